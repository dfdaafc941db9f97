"""Online RL with a real SGLang server (slow): a standalone gateway records what the server samples for agents that are
unaware of training, and a trainer leases it and pushes every version into the server.

`engine.urls`: running servers get the weights of the run, under its version, and stay when it ends; a missing one,
or one with another model, is a ConfigError.
"""

import asyncio
import contextlib
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest

from areal_agent.cluster.engines import open_engine
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.errors import ConfigError
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.types import WeightVersion
from tests.run.online_processes import KEY, LIMIT_S, ROOT, config, free_port, running, wait_for

from ..sampled import Weights, assert_sampled_by
from ..servers import BEGUN_WITH
from .conftest import serve_again

NUM_STEPS = 3

pytestmark = pytest.mark.slow


async def served_version(url: str) -> WeightVersion:
    async with aclosing(ForeignEngine(SglangServer(url))) as engine:
        return (await engine.info()).weight_version


def test_what_agents_elsewhere_did_is_trained(
    real_server: str, real_model: Path, small_model: Path, tmp_path: Path
) -> None:
    asyncio.run(serve_again(real_server, real_model, BEGUN_WITH))
    port, key_file, gateway = free_port(), tmp_path / "key", tmp_path / "gateway"
    url, gateway_log, run_log = f"http://127.0.0.1:{port}", tmp_path / "gateway.log", tmp_path / "train.log"
    key_file.write_text(KEY)
    with ExitStack() as stack:
        serve = ("-m", "areal_agent.gateway", "--engine", real_server, "--tokenizer", str(small_model))
        record = ("--ledger", str(gateway), "--group-wait", "5")
        process = stack.enter_context(running(gateway_log, *serve, "--port", str(port), *record))
        wait_for(lambda: "gateway ready" in gateway_log.read_text(), gateway_log, process)
        assert f"the engine at {real_server}, which is sglang" in gateway_log.read_text()
        play = ("--gateway", url, "--key-file", str(key_file), "--group-size", "2", "--groups", "3")
        stack.enter_context(running(tmp_path / "agent.log", str(ROOT / "examples/online_rl/agent.py"), *play))
        path = config(tmp_path, real_model, real_server, url, steps=NUM_STEPS)
        train = stack.enter_context(running(run_log, "-m", "areal_agent.train", "--config", str(path)))
        assert train.wait(4 * LIMIT_S) == 0, run_log.read_text()[-2000:]
        assert asyncio.run(served_version(real_server)).step == NUM_STEPS
    steps = [row["step"] for row in step_rows(read_metrics(tmp_path / "run" / "metrics.jsonl"))]
    assert steps == list(range(1, NUM_STEPS + 1))
    assert verify(gateway / "ledger.sqlite").violations == ()


VERSION = WeightVersion(incarnation=3, step=0)


async def test_a_running_server_serves_the_run(running, ask, truth, tmp_path: Path):
    config, model = running
    for version in (VERSION, VERSION):  # the second is another run, which may begin at the same version
        async with open_engine(config, model, version, tmp_path) as engine:
            request = ask(1)
            result = await engine.client.generate(request)
            assert_sampled_by(Weights(model=model, version=version), request, result, truth)
            async with contextlib.aclosing(engine.address.connect()) as another:
                info = await another.info()
            assert (info.weight_version, info.max_context_tokens) == (version, 300)
            assert engine.servers is None


async def test_a_server_with_another_model_is_refused(running, tiny, tmp_path: Path):
    config, _ = running
    with pytest.raises(ConfigError, match=r"engine.urls: .*publish the model that the engine loaded"):
        async with open_engine(config, tiny, VERSION, tmp_path):
            pass


async def test_a_server_that_is_not_there(unused_tcp_port, tiny, tmp_path: Path):
    config = EngineConfig(urls=(f"http://127.0.0.1:{unused_tcp_port}",), startup_timeout_s=0.2)
    with pytest.raises(ConfigError, match=r"engine.urls: .*did not serve within 0\.2 s"):
        async with open_engine(config, tiny, VERSION, tmp_path):
            pass
