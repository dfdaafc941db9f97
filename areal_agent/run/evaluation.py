"""The evaluations of a run. (`python -m areal_agent.eval`, which trains nothing, is in grading.py.)

Before and after training a run waits for its evaluation; in between, one goes on beside training::

    run.push ──▶ begin ──▶ a task of its own: held-out tasks and benchmarks, on the engine of training ──▶ row, note
                               │ at most a quarter of the rollout slots, so that training goes on

The engine has one set of weights, which pushes replace: an evaluation beside training begins under one version, and its
later answers come from later ones. Its row counts the answers of each version; the ledger has the version of every
token. Tasks, seeds and sampling are always the same, so a checkpoint graded by `areal_agent.eval` gives the figure of
`summary.json`.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from areal_agent.observe.progress import Progress
from areal_agent.run.benchmarks import Benchmark
from areal_agent.run.results import RunMetrics
from areal_agent.run.serving import EvalAnswer, EvalReport
from areal_agent.run.sources import Source
from areal_agent.types import Task, WeightVersion

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Evaluation:
    """Rolls out the held-out tasks of a run, and its benchmarks, with the same tasks, seeds and sampling each time."""

    def __init__(
        self,
        tasks: Sequence[Task],
        benchmarks: Sequence[Benchmark],
        *,
        source: Source,
        metrics: RunMetrics,
        progress: Progress,
        max_concurrent: int,
    ) -> None:
        self._tasks = tasks
        self._num_rollouts = len(tasks) + sum(one.num_rollouts for one in benchmarks)
        self._source = source
        self._metrics = metrics
        self._progress = progress
        self._max_concurrent = max_concurrent
        self._beside: asyncio.Task[None] | None = None
        self._newest: WeightVersion | None = None  # the version evaluated last beside training

    async def run(self, label: str, version: WeightVersion) -> EvalReport:
        """Evaluate and wait for the result. Nothing else may be under way, so that all answers are of `version`."""
        self._progress.phase(f"evaluating {label}")
        on_answer = _counting(self._progress, self._num_rollouts)
        with self._metrics.during("evaluating"):
            return await self._evaluate(label, version, on_answer, self._num_rollouts)

    def begin(self, version: WeightVersion, spawn: Spawn) -> bool:
        """Evaluate in a task made by `spawn`. Return False, and start nothing, while the last one is still under way.

        It starts nothing either for a version that was already evaluated beside training: the result would be the same.
        """
        if self._beside is not None and not self._beside.done():
            self._progress.note(f"no evaluation of version {version}: the one before it is still under way")
            return False
        if version == self._newest:
            return False
        self._newest = version
        self._beside = spawn(self._evaluate_beside(version), f"evaluation of version {version}")
        return True

    async def finish(self) -> None:
        """Wait for an evaluation that is under way."""
        if self._beside is not None and not self._beside.done():
            self._progress.phase("waiting for the evaluation that is under way")
            with self._metrics.during("evaluating"):
                await asyncio.wait({self._beside})

    async def cancel(self) -> None:
        """Give up an evaluation that is under way: its rollouts end as `cancelled`, and it has no result."""
        if self._beside is not None and not self._beside.done():
            self._beside.cancel()
            await asyncio.wait({self._beside})

    async def _evaluate_beside(self, version: WeightVersion) -> None:
        report = await self._evaluate(f"step{version.step}", version, lambda _: None, self._max_concurrent)
        answers = [answer for one in (report, *report.benchmarks.values()) for answer in one.answers]
        newest = max((answer.steps[-1] for answer in answers if answer.steps), default=version.step)
        self._progress.note(
            f"success: {told_success(report.success, report.successes())}, "
            f"by the weights of step {version.step}" + (f" to {newest}" if newest > version.step else "")
        )

    async def _evaluate(
        self, label: str, version: WeightVersion, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        def count(answer: EvalAnswer) -> None:
            self._metrics.answered(answer)
            on_answer(answer)

        started_s = time.monotonic()
        group_id = f"eval-{label}-{version.incarnation}"
        report = await self._source.evaluate(self._tasks, group_id, count, max_concurrent)
        self._metrics.evaluated(label, version, report, time.monotonic() - started_s)
        every = (report, *report.benchmarks.values())
        if num_failed := sum(one.num_failed for one in every):
            num_answers = sum(len(one.answers) for one in every)
            self._progress.note(
                f"{num_failed} of {num_answers} rollouts of this evaluation failed and count as no success; the causes "
                "are in the run's logs"
            )
        return report


def told_success(held_out: float | None, benchmarks: Mapping[str, float]) -> str:
    """Return the success of an evaluation for people.

    >>> told_success(0.25, {"aime24": 0.5})
    '0.250 on the held-out tasks, 0.500 on aime24'
    """
    known = {**({} if held_out is None else {"the held-out tasks": held_out}), **benchmarks}
    return ", ".join(f"{success:.3f} on {name}" for name, success in known.items())


def _counting(progress: Progress, num_rollouts: int) -> Callable[[EvalAnswer], None]:
    """Return a function that shows, at each answer, how many rollouts are done."""
    numbers = itertools.count(1)

    def show(_: EvalAnswer) -> None:
        number = next(numbers)
        progress.phase_progress(number / num_rollouts, f"{number}/{num_rollouts} answers")

    return show
