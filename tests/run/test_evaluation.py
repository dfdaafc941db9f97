"""The evaluations of a run, on a source whose answers come when the test says so.

- One beside training leaves its result in metrics.jsonl, under the version with which it began.
- A second is not begun while the first is under way, nor one of the same version; it takes a part of the slots only.
- A run that ends can wait for it, which is time of evaluating, or give it up, and then it leaves no result.
- The seconds of both sides add up in every row.
- A rollout that failed counts as no success, and in no mean; the row counts answers by the oldest weights in them.
- The command notes in its ledger that it completed; when the engine does not start, its folder's name is free again.
"""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_agent import Status
from areal_agent.engine.wire.control import EngineStats
from areal_agent.errors import ArealAgentError
from areal_agent.files import RunFolder
from areal_agent.gateway.metrics import Counters
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.observe.metrics import evaluation_rows, read_metrics
from areal_agent.observe.progress import Progress
from areal_agent.rollout.local import RolloutStats
from areal_agent.run.evaluation import Evaluation, evaluate
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
        self, tasks: tuple[Task, ...], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
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
    answers = [EvalAnswer.of(one) for one in (trajectory("a", [1], 1.0), trajectory("b", [1], 0.5), failed)]
    report = EvalReport.of(answers, success_reward=1.0)
    assert (report.success, report.reward_mean) == (pytest.approx(1 / 3), 0.75)
    assert (report.num_tasks, report.num_failed) == (3, 1)


def test_answers_are_counted_by_their_weights() -> None:
    answers = [EvalAnswer.of(trajectory(str(versions), versions, 1.0)) for versions in ([4, 4], [4, 5, 5], [6], [])]
    assert [answer.steps for answer in answers] == [(4,), (4, 5), (6,), ()]
    metrics = EvalReport.of(answers, success_reward=1.0).metrics()
    assert (metrics["eval/answers_at/4"], metrics["eval/answers_at/6"], metrics["eval/spanning"]) == (2, 1, 1)
    assert metrics["eval/tokens"] == 6


@pytest.mark.slow
def test_the_command(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graded.py").write_text(
        "async def solve(task, rollout):\n"
        "    await rollout.client.chat.completions.create(model=rollout.model, messages=task['messages'])\n"
        "    return 1.0\n\n\n"
        "def load(split, seed):\n"
        "    return [{'messages': [{'role': 'user', 'content': 'What is 1?'}]}] * 2\n"
    )
    (tmp_path / "c.yaml").write_text(
        f"model: {small_model}\nworkflow: graded:solve\ntasks: graded:load\nengine: {{max_context_tokens: 256}}\n"
        "rollout: {max_tokens: 8}\neval: {num_tasks: 2}\nobserve: {progress: none}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert evaluate("c.yaml", ()) == 0
    with reading(tmp_path / "runs" / "c-eval" / "ledger.sqlite") as snapshot:
        assert questions.note(snapshot, questions.STATUS_NOTE) == "completed"
    broken = shutil.copytree(small_model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(ArealAgentError, match=r"c-eval-2/logs/engine\.log"):
        evaluate("c.yaml", ("model=broken",))
    assert RunFolder.choose(None, "c-eval").path.name == "c-eval-2"
