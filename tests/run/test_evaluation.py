"""The evaluations of a run, on a source whose answers come when the test says so.

- One beside training leaves its result in metrics.jsonl, under the version with which it began.
- A second is not begun while the first is under way, nor one of the same version; it takes a part of the slots only.
- A run that ends can wait for it, which is time of evaluating, or give it up, and then it leaves no result.
- The seconds of both sides add up in every row.
- A rollout that failed counts as no success, and in no mean; the row counts answers by the oldest weights in them.
- The command tries again what the sandbox failed, goes on where it was interrupted, compares two, and notes in its
  ledger that it completed; when the engine does not start, its folder's name is free again.
"""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_agent import Status
from areal_agent.engine.wire.control import EngineStats
from areal_agent.errors import ArealAgentError, ConfigError
from areal_agent.files import RunFolder
from areal_agent.gateway.metrics import Counters
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.observe.metrics import evaluation_rows, read_metrics
from areal_agent.observe.progress import Progress
from areal_agent.rollout.local import RolloutStats
from areal_agent.run.evaluation import Evaluation
from areal_agent.run.grading import compare, evaluate, resume
from areal_agent.run.results import RunMetrics
from areal_agent.run.serving import EvalAnswer, EvalReport
from areal_agent.run.sources import SourceCounts
from areal_agent.types import Task, WeightVersion
from tests.histories import trajectory

TASKS = tuple(Task(id=str(number), data={}) for number in range(4))
VERSION, LATER = WeightVersion(step=3), WeightVersion(step=4)


class IdleEngine:
    async def stats(self) -> EngineStats:
        return EngineStats(num_running=0, num_queued=0, busy_s=0.0, generated_tokens=0, weight_version=VERSION)


class SlowSource:
    """As much of a `Source` as an evaluation and its metrics need: it answers once `release` is set."""

    def __init__(self) -> None:
        self.engine = IdleEngine()
        self.release = asyncio.Event()
        self.max_concurrent = 0

    async def evaluate(
        self, tasks: Sequence[Task], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        self.max_concurrent = max_concurrent
        await self.release.wait()
        answers = [
            EvalAnswer(session_id=f"{group_id}-{task.id}", task_id=task.id, reward=1.0, num_tokens=5, steps=(3, 4))
            for task in tasks
        ]
        for answer in answers:
            on_answer(answer)
        return EvalReport.of(answers, success_reward=1.0)

    async def stats(self) -> RolloutStats:
        return RolloutStats(gateway=Counters().snapshot(num_open_sessions=0), rolling_s=0.0, loop_blocked_s=0.0)

    def counts(self) -> SourceCounts:
        return SourceCounts(running=0, finished=0, statuses={}, drops={})

    def process_ids(self) -> dict[str, int]:
        return {}


class Stage:
    """An evaluation, its source and its metrics, and a task group that owns what goes on beside."""

    def __init__(self, path: Path, tasks: asyncio.TaskGroup) -> None:
        self.path = path
        self.source = SlowSource()
        self.metrics = RunMetrics(Progress(total_steps=1, mode="none"), success_reward=1.0)
        self.metrics.open(path)
        self.evaluation = Evaluation(
            TASKS,
            (),
            source=self.source,
            metrics=self.metrics,
            progress=Progress(total_steps=1, mode="none"),
            max_concurrent=2,
        )
        self._tasks = tasks

    def begin(self, version: WeightVersion = VERSION) -> bool:
        return self.evaluation.begin(version, lambda work, name: self._tasks.create_task(work, name=name))

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncGenerator[Stage]:
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tmp_path / "metrics.jsonl", tasks)
        await stage.metrics.connect(stage.source, {})
        yield stage
        stage.source.release.set()
    await stage.metrics.aclose()


async def test_its_result_is_that_of_the_version_with_which_it_began(stage: Stage) -> None:
    assert stage.begin()
    stage.source.release.set()
    await stage.evaluation.finish()
    (row,) = evaluation_rows(stage.rows())
    assert (row["label"], row["step"], row["eval/success"]) == ("step3", 3, 1.0)
    assert (row["eval/answers_at/3"], row["eval/spanning"], row["eval/num_tasks"]) == (4, 4, 4)


async def test_one_at_a_time_and_a_version_once(stage: Stage) -> None:
    assert stage.begin()
    assert not stage.begin(LATER)
    stage.source.release.set()
    await stage.evaluation.finish()
    assert not stage.begin()
    assert stage.begin(LATER)


async def test_beside_training_it_takes_a_part_of_the_slots(stage: Stage) -> None:
    stage.source.release.set()
    stage.begin()
    await stage.evaluation.finish()
    assert stage.source.max_concurrent == 2
    await stage.evaluation.run("after", VERSION)
    assert stage.source.max_concurrent == len(TASKS)


async def test_waiting_for_it_is_time_of_evaluating(stage: Stage) -> None:
    stage.begin()
    waiting = asyncio.ensure_future(stage.evaluation.finish())
    await asyncio.sleep(0)
    await stage.metrics.end_time(VERSION)
    stage.source.release.set()
    await waiting
    assert stage.rows()[0]["seconds/trainer/evaluating"] > 0.0


async def test_one_that_is_given_up_leaves_no_result(stage: Stage) -> None:
    stage.begin()
    await stage.evaluation.cancel()
    stage.source.release.set()
    assert evaluation_rows(stage.rows()) == []
    assert stage.begin(LATER)  # the next may come


async def test_the_seconds_of_both_sides_add_up_in_every_row(stage: Stage) -> None:
    with stage.metrics.during("starting"):
        await stage.metrics.begin_steps(VERSION)
    with stage.metrics.during("saving"):
        stage.metrics.end_steps()
        await stage.metrics.end_time(VERSION)
    for row in stage.rows():
        for side in ("engine", "trainer"):
            seconds = [value for name, value in row.items() if name.startswith(f"seconds/{side}/")]
            assert sum(seconds) == pytest.approx(row["seconds/wall"])
    assert len(stage.rows()) == 2


def test_a_failed_rollout_is_no_success_and_in_no_mean() -> None:
    failed = replace(trajectory("c", [1], 1.0), status=Status.TIMEOUT)
    histories = (trajectory("a", [1], 1.0), trajectory("b", [1], 0.5), failed)
    answers = [replace(EvalAnswer.of(one), task_id=one.session_id) for one in histories]
    report = EvalReport.of(answers, success_reward=1.0)
    assert (report.success, report.reward_mean) == (pytest.approx(1 / 3), 0.75)
    assert (report.num_tasks, report.num_failed) == (3, 1)


def test_answers_are_counted_by_their_weights() -> None:
    answers = [EvalAnswer.of(trajectory(str(versions), versions, 1.0)) for versions in ([4, 4], [4, 5, 5], [6], [])]
    assert [answer.steps for answer in answers] == [(4,), (4, 5), (6,), ()]
    metrics = EvalReport.of(answers, success_reward=1.0).metrics()
    assert (metrics["eval/answers_at/4"], metrics["eval/answers_at/6"], metrics["eval/spanning"]) == (2, 1, 1)
    assert metrics["eval/tokens"] == 6


GRADED = """
from areal_agent.errors import SandboxError

calls = {}

async def solve(task, rollout):
    await rollout.client.chat.completions.create(model=rollout.model, messages=task["messages"])
    calls[task["id"]] = calls.get(task["id"], 0) + 1
    if task["id"] == "sum" and calls["sum"] == 1:
        raise SandboxError("the sandbox is gone")
    rollout.log(answer=calls[task["id"]])
    return 1.0 if task["id"] == "sum" else 0.0

def load(split, seed):
    ask = [{"role": "user", "content": "What is 1?"}]
    return [{"id": "sum", "messages": ask, "tags": ["easy"]}, {"id": "product", "messages": ask}]
"""


@pytest.mark.slow
def test_the_command(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "graded.py").write_text(GRADED)
    (tmp_path / "c.yaml").write_text(
        f"model: {small_model}\nworkflow: graded:solve\ntasks: graded:load\nengine: {{max_context_tokens: 256}}\n"
        "rollout: {max_tokens: 8}\neval: {num_tasks: 2}\nobserve: {progress: none}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert evaluate("c.yaml", (), num_samples=2) == 0
    folder = tmp_path / "runs" / "c-eval"
    told = capsys.readouterr().out
    assert "pass@1      0.500" in told and "easy: pass@1 1.000" in told
    with reading(folder / "ledger.sqlite") as snapshot:
        assert questions.note(snapshot, questions.STATUS_NOTE) == "completed"
        endings = questions.eval_endings(snapshot)
    assert sorted(endings.values()) == ["completed"] * 4 + ["infra"]  # what the sandbox failed was tried again
    with sqlite3.connect(folder / "ledger.sqlite") as connection:  # as if it had been interrupted before the last one
        connection.execute("UPDATE endings SET status = 'cancelled' WHERE number = (SELECT max(number) FROM endings)")
    assert resume(folder, ()) == 0
    with reading(folder / "ledger.sqlite") as snapshot:
        assert len(questions.eval_endings(snapshot)) == 6
    assert compare(folder, folder).splitlines()[3] == "0 tasks better, 0 worse, 2 alike"
    broken = shutil.copytree(small_model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(ArealAgentError, match=r"c-eval-2/logs/engine\.log"):
        evaluate("c.yaml", ("model=broken",))
    assert RunFolder.choose(None, "c-eval").path.name == "c-eval-2"
    with pytest.raises(ConfigError, match=r"its results\.json cannot be read"):
        compare(folder, broken)
