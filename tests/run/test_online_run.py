"""Online RL by its commands: an engine, a gateway that stands alone, agents that know nothing of training, a trainer.

1. the gateway is killed in the middle and started again on its ledger: training completes, every leased rollout is
trained, both ledgers are proved, and its steps come out bit for bit; 2. what a config may not combine with a gateway
elsewhere is one line.
"""

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from areal_agent import ConfigError
from areal_agent.config import Config
from areal_agent.ledger import questions
from areal_agent.ledger.__main__ import main
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.questions import LedgerCounts
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.run.preflight import Preflight
from tests.run.online_processes import KEY, LIMIT_S, ROOT, config, free_port, running, wait_for


async def counts_of(ledger: Path) -> LedgerCounts:
    opened = await Ledger.open(ledger, create=False)
    counts = await opened.ask(questions.counts)
    await opened.aclose()
    return counts


@pytest.mark.slow
def test_a_gateway_that_is_killed_loses_nothing(tmp_path: Path, small_model: Path) -> None:
    port = free_port()
    gateway_url = f"http://127.0.0.1:{port}"
    url_file, key_file = tmp_path / "engine.url", tmp_path / "key"
    key_file.write_text(KEY)
    engine_log, gateway_log, run_log = tmp_path / "engine.log", tmp_path / "gateway.log", tmp_path / "train.log"
    engine_args = ("-m", "areal_agent.engine", "--model", str(small_model), "--port", "0", "--max-context", "512")
    with ExitStack() as stack:
        engine = stack.enter_context(running(engine_log, *engine_args, "--announce", str(url_file)))
        wait_for(url_file.exists, engine_log, engine)
        engine_url = url_file.read_text()
        gateway_args = ("-m", "areal_agent.gateway", "--engine", engine_url, "--tokenizer", str(small_model))
        gateway_args += ("--port", str(port), "--ledger", str(tmp_path / "gateway"), "--group-wait", "5")
        agent = ("--gateway", gateway_url, "--key-file", str(key_file), "--group-size", "2", "--groups", "3")
        with running(gateway_log, *gateway_args) as gateway:
            wait_for(lambda: "gateway ready" in gateway_log.read_text(), gateway_log, gateway)
            stack.enter_context(running(tmp_path / "agent.log", str(ROOT / "examples/online_rl/agent.py"), *agent))
            path = config(tmp_path, small_model, engine_url, gateway_url)
            train = stack.enter_context(running(run_log, "-m", "areal_agent.train", "--config", str(path)))
            metrics = tmp_path / "run" / "metrics.jsonl"
            wait_for(lambda: metrics.exists() and metrics.read_text().count('"kind":"step"') >= 2, run_log, train)
            gateway.send_signal(signal.SIGKILL)
        with running(gateway_log, *gateway_args) as gateway:
            assert train.wait(LIMIT_S) == 0, run_log.read_text()[-2000:]
            gateway.send_signal(signal.SIGTERM)
            assert gateway.wait(LIMIT_S) == 0, gateway_log.read_text()[-2000:]
    rows = step_rows(read_metrics(metrics))
    counts = asyncio.run(counts_of(tmp_path / "gateway" / "ledger.sqlite"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["staleness/max"] for row in rows) <= 2
    assert (counts.num_trained, counts.num_leased) == (sum(row["rollouts/trained"] for row in rows), 0)
    for ledger in (tmp_path / "gateway" / "ledger.sqlite", tmp_path / "run" / "ledger.sqlite"):
        assert verify(ledger).violations == ()
    assert main(["replay", str(tmp_path / "run"), "--sessions", str(tmp_path / "gateway")]) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": {}}, "rollout.gateway_url needs engine.url"),
        ({"straggler": "mask"}, "straggler is 'mask'"),
        ({"workflow": "a:b"}, "workflow has no effect with rollout.gateway_url"),
        ({"tasks": "a:b"}, "tasks has no effect"),
        ({"eval": {"num_tasks": 3}}, r"eval\.num_tasks has no effect"),
        ({"engine": {"url": "http://127.0.0.1:1", "threads": 2}}, r"engine\.threads has no effect"),
        ({"rollout": {"gateway_url": "http://127.0.0.1:2", "timeout_s": 1}}, r"rollout\.timeout_s has no effect"),
        ({"rollout": {"gateway_url": "127.0.0.1:2"}}, r"rollout\.gateway_url is '127\.0\.0\.1:2'"),
        ({"rollout": {}, "tasks": "a:b"}, r"engine\.url needs rollout\.gateway_url"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path: Path, values: dict[str, object], message: str) -> None:
    path = config(tmp_path, tmp_path, "http://127.0.0.1:1", "http://127.0.0.1:2", **values)
    with pytest.raises(ConfigError, match=message):
        Config.load(path)


def test_an_engine_on_another_machine_is_refused(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_AGENT_ADMIN_KEY", KEY)
    path = config(tmp_path, small_model, "http://192.0.2.1:1", "http://127.0.0.1:2")
    with pytest.raises(ConfigError, match=r"engine\.url = http://192\.0\.2\.1:1: .* is another machine"):
        Preflight.check(Config.load(path))


def test_a_missing_admin_key_is_named(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_AGENT_ADMIN_KEY", raising=False)
    path = config(tmp_path, small_model, "http://127.0.0.1:1", "http://127.0.0.1:2")
    with pytest.raises(ConfigError, match="set AREAL_AGENT_ADMIN_KEY, or rollout"):
        Preflight.check(Config.load(path))
