"""A whole run with real processes and a small random model.

1. Failing siblings leave the rest trained, and are counted. 2. A trainer that dies ends it with an error; engines that
die are started again, one or all of several. 3. A workflow that always fails ends it. 4. rollout_batch is synchronous.
5. A trainer that is too slow to start is an error. 6. Nothing is sampled greedily for training. 7. A server joins and
another leaves while it trains. 8. Keys and values come back when a train step fails, too. 9. Engine options that would
have no effect are refused. replay/test_training.py trains and resumes; resume/test_saving.py resumes, too;
trainer/test_whole_runs.py has max_staleness 0, and weights that go other ways.
"""

import asyncio
import json
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_agent import Status
from areal_agent.config import Config
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.errors import ConfigError, ProcessDied, RolloutsFailing, TrainerError
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.run import Run
from areal_agent.run.sources import memory_lent
from areal_agent.types import WeightVersion
from tests.cluster.conftest import serving


async def solve(task, rollout) -> float:
    """Two turns; a reward that a random model can earn: digits in the answer."""
    messages = list(task["messages"])
    text = ""
    for _ in range(2):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    return sum(letter.isdigit() for letter in text) / 10


def config(tmp_path: Path, model: Path, **values: object) -> Config:
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"id": str(n), "messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(50)]
    tasks.write_text("\n".join(map(json.dumps, lines)))
    return Config.parse(
        {
            "model": str(model),
            "tasks": str(tasks),
            "run_dir": str(tmp_path / "run"),
            "steps": 4,
            "batch_size": 4,
            "group_size": 2,
            "max_staleness": 2,
            "rollout": {"max_concurrent": 16, "max_tokens": 48},
            "engine": {"max_running_requests": 16, "max_context_tokens": 256},
            "trainer": {"learning_rate": 1e-3, "checkpoint_every": 2},
            "eval": {"num_tasks": 0},
            **values,
        }
    )


def a_server(model: Path) -> AbstractAsyncContextManager[EngineServer]:
    """An engine that the run does not start."""
    return serving(model, max_context_tokens=256, version=WeightVersion(incarnation=5, step=5))


async def train(run: Run, steps: int) -> None:
    while run.step < steps:
        batch = await run.prepare_batch()
        await run.train_step(batch)
        await run.push()


async def end(run: Run) -> None:
    await run.stop_producing()
    await run.save()
    await run.settle(is_completed=True)


def proved_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's steps once its ledger has proved it."""
    report = verify(folder / "ledger.sqlite")
    assert report.is_ok, report
    return step_rows(read_metrics(folder / "metrics.jsonl"))


@pytest.mark.slow
async def test_failing_siblings_leave_the_rest_trained(tmp_path: Path, small_model: Path) -> None:
    async def moody(task, rollout):
        kind = rollout.seed % 7
        if kind == 0:
            raise RuntimeError("the workflow is broken")
        if kind == 1:
            return float("nan")
        if kind == 2:
            return 1.0  # without a model call
        reward = await solve(task, rollout)
        if kind == 3:
            return None
        if kind == 4:
            await asyncio.sleep(3600)
        return reward

    settings = config(tmp_path, small_model, group_size=6, steps=2, rollout={"max_concurrent": 24, "timeout_s": 3})
    async with Run(settings, workflow=moody) as run:
        trained = []
        while run.step < 2:
            batch = await run.prepare_batch()
            trained += batch.trained
            await run.train_step(batch)
            await run.push()
        statuses = dict(run.source.counts().statuses)
        await end(run)
    assert {one.status for one in trained} == {Status.COMPLETED}
    assert {"error", "missing_reward", "timeout", "completed"} <= set(statuses)
    assert proved_rows(run.folder.path)


@pytest.mark.slow
async def test_engines_that_die_are_started_again_and_a_trainer_ends_the_run(tmp_path: Path, small_model: Path) -> None:
    engine = {"num_servers": 2, "max_running_requests": 8, "max_context_tokens": 256, "wait_s": 1e4}
    with pytest.raises(ProcessDied, match="the trainer process was killed by SIGKILL"):
        async with Run(config(tmp_path, small_model, engine=engine), workflow=solve) as run:
            await train(run, 1)
            for num_killed in (1, 2):
                before = set(run.source.process_ids().values())
                assert len(before) == 2
                killed = set(sorted(before)[:num_killed])
                for process_id in killed:
                    os.kill(process_id, signal.SIGKILL)
                while len(alive := set(run.source.process_ids().values())) < 2 or killed & alive:
                    await train(run, run.step + 1)
            steps = run.step
            await run.save()
            os.kill(run._gang.processes[0].pid, signal.SIGKILL)
            await train(run, steps + 100)
    assert not run._gang.processes[0].is_running
    for process_id in alive:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    assert len(proved_rows(run.folder.path)) >= steps > 2


@pytest.mark.slow
async def test_after_a_batch_of_its_own_a_server_joins_and_another_leaves(tmp_path: Path, small_model: Path) -> None:
    async with a_server(small_model) as server, Run(config(tmp_path, small_model), workflow=solve) as run:
        batch = await run.rollout_batch(list(run.preflight.tasks)[:3])
        assert [group.task_id for group in batch.groups] == ["0", "1", "2"]
        await run.train_step(batch)
        for _ in range(2):  # once more, as a user's own loop may: no row of its own
            await run.push()
            assert run.version.step == 1
        (first,) = run.source.process_ids().values()
        url, key = (getattr(run.folder, name).read_text().strip() for name in ("engines_url", "admin_key"))
        async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as http:
            http.headers["Authorization"] = f"Bearer {key}"
            answer = await http.post("/rl/engines", json={"add": server.base_url})
            assert answer.status_code == 200, answer.text
            old, new = answer.json()["engines"]
            assert (old["version"], new["version"], new["state"]) == ("0:1", "0:1", "serving")
            answer = await http.post("/rl/engines", json={"remove": old["url"]})
            assert [one["url"] for one in answer.json()["engines"]] == [server.base_url]
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)  # it was started by the run
        await train(run, 3)
        await end(run)
    assert not run.folder.admin_key.exists() and not run.folder.engines_url.exists()
    assert [row["step"] for row in proved_rows(run.folder.path)] == [1, 2, 3]


@pytest.mark.slow
async def test_a_workflow_that_always_fails_ends_the_run(tmp_path: Path, small_model: Path) -> None:
    async def broken(task, rollout):
        raise KeyError("answer")

    with pytest.raises(RolloutsFailing, match=r"8 groups in a row failed as a whole.*KeyError: 'answer'"):
        async with Run(config(tmp_path, small_model), workflow=broken) as run:
            await run.prepare_batch()
    with reading(run.folder.ledger) as snapshot:
        assert questions.note(snapshot, questions.STATUS_NOTE) == "failed"


@pytest.mark.slow
async def test_a_trainer_that_is_too_slow_to_start_is_an_error(tmp_path: Path, small_model: Path) -> None:
    async with a_server(small_model) as server:
        settings = config(
            tmp_path, small_model, engine={"urls": [server.base_url]}, trainer={"startup_timeout_s": 1e-6}
        )
        with pytest.raises(TrainerError, match=r"trainer\.startup_timeout_s = 1e-06"):
            async with Run(settings, workflow=solve):
                pass


def test_greedy_rollouts_cannot_be_trained(tmp_path: Path, small_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.temperature is 0"):
        Run(config(tmp_path, small_model, rollout={"temperature": 0}), workflow=solve)


class Memory:
    """A `MemoryHolder` that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def release_memory(self) -> None:
        self.calls.append("release")

    async def resume_memory(self) -> None:
        self.calls.append("resume")


async def test_the_memory_comes_back_when_a_train_step_fails() -> None:
    memory = Memory()
    with pytest.raises(ValueError, match="training failed"):
        async with memory_lent(memory):
            assert memory.calls == ["release"]
            raise ValueError("training failed")
    assert memory.calls == ["release", "resume"]
    async with memory_lent(None):  # an engine that keeps its memory is left alone
        pass


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kv_tokens": 512, "leave_gib": 1}, "kv_tokens is 512 and engine.leave_gib 1, but .* leave one out"),
        ({"urls": ["http://127.0.0.1:1"], "leave_gib": 1}, "leave_gib only applies to the embedded engine"),
        ({"urls": ["http://127.0.0.1:1"], "release_kv": True}, "release_kv only applies to the embedded engine"),
        ({"leave_gib": float("nan")}, "leave_gib"),
    ],
)
def test_what_would_have_no_effect_is_refused(engine: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.parse({"tasks": "tasks.jsonl", "eval": {"num_tasks": 0}, "engine": engine})
