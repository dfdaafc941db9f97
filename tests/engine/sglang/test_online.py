"""Online RL with a real SGLang server (slow): a standalone gateway records what the server samples for agents that are
unaware of training, and a trainer leases it and pushes every version into the server.
"""

import asyncio
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest

from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.types import WeightVersion
from tests.run.online_processes import KEY, LIMIT_S, ROOT, config, free_port, running, wait_for

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
