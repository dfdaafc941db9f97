"""The evaluations of a run, and `python -m areal_agent.eval`, which grades a model and trains nothing.

Before and after training a run waits for its evaluation; in between, one goes on beside training::

    run.push ──▶ begin ──▶ a task of its own: held-out rollouts on the engine that training uses ──▶ row, note
                               │ at most a quarter of the rollout slots, so that training goes on

The engine has one set of weights, which pushes replace: an evaluation beside training begins under one version, and its
later answers come from later ones. Its row counts the answers of each version; the ledger has the version of every
token. Tasks, seeds and sampling are always the same, so a checkpoint graded by `areal_agent.eval` gives the figure of
`summary.json`.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from areal_agent.cluster.local import obtain_model
from areal_agent.cluster.ray_hosts import open_hosts
from areal_agent.config import Config
from areal_agent.errors import ConfigError, RolloutsFailing
from areal_agent.files import RunFolder
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.questions import STATUS_NOTE
from areal_agent.observe.progress import Progress
from areal_agent.process import start_logging
from areal_agent.run.preflight import Preflight
from areal_agent.run.results import RunMetrics, RunStatus
from areal_agent.run.serving import EvalAnswer, EvalReport, open_serving
from areal_agent.run.sources import Source
from areal_agent.types import Task, WeightVersion

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Evaluation:
    """Rolls out the held-out tasks of a run again and again, with the same tasks, seeds and sampling each time."""

    def __init__(
        self, tasks: tuple[Task, ...], *, source: Source, metrics: RunMetrics, progress: Progress, max_concurrent: int
    ) -> None:
        self._tasks = tasks
        self._source = source
        self._metrics = metrics
        self._progress = progress
        self._max_concurrent = max_concurrent
        self._beside: asyncio.Task[None] | None = None
        self._newest: WeightVersion | None = None  # the version evaluated last beside training

    async def run(self, label: str, version: WeightVersion) -> EvalReport:
        """Evaluate and wait for the result. Nothing else may be under way, so that all answers are of `version`."""
        self._progress.phase(f"evaluating {label}")
        on_answer = _counting(self._progress, len(self._tasks))
        with self._metrics.during("evaluating"):
            return await self._evaluate(label, version, on_answer, len(self._tasks))

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
        newest = max((answer.steps[-1] for answer in report.answers if answer.steps), default=version.step)
        self._progress.note(
            f"success on {report.num_tasks} held-out tasks: {report.success:.3f}, "
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
        return report


def _counting(progress: Progress, num_tasks: int) -> Callable[[EvalAnswer], None]:
    """Return a function that shows, at each answer, how many tasks are done."""
    numbers = itertools.count(1)

    def show(_: EvalAnswer) -> None:
        number = next(numbers)
        progress.phase_progress(number / num_tasks, f"{number}/{num_tasks} tasks")

    return show


def evaluate(file: str, overrides: Sequence[str]) -> int:
    """Evaluate as a config says and return the exit code. Raises ArealAgentError."""
    config = Config.load(file, overrides)
    preflight = Preflight.check(config, name=f"{Path(file).stem}-eval")
    preflight = replace(preflight, folder=RunFolder(preflight.folder.path))  # of its files, no machine reads others
    if not preflight.eval_tasks:
        raise ConfigError("eval.num_tasks is 0: there is nothing to evaluate")
    report = asyncio.run(_evaluate(preflight))
    summary = {
        "status": "failed" if report.num_failed == report.num_tasks else "completed",
        "model": config.model,
        "success": report.success,
        "reward_mean": report.reward_mean,
        "num_tasks": report.num_tasks,
        "num_failed": report.num_failed,
    }
    preflight.folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    print(
        f"success on {report.num_tasks} held-out tasks: {report.success:.3f} (mean reward {report.reward_mean:.3f}, "
        f"{report.num_failed} rollouts failed)\n"
        f"in {preflight.folder.path}: summary.json, and the ledger with every token"
    )
    if report.num_failed == report.num_tasks:
        raise RolloutsFailing(f"every rollout failed; the causes are in {preflight.folder.logs / 'main.log'}")
    return 0


async def _evaluate(preflight: Preflight) -> EvalReport:
    """Evaluate in the run's folder, which is given up when the engine does not start."""
    config, folder = preflight.config, preflight.folder
    assert preflight.workflow is not None  # preflight makes sure of it: held-out tasks need a workflow
    progress = Progress(total_steps=config.steps, mode=config.observe.progress)
    status, has_started = RunStatus.INTERRUPTED, False
    try:
        folder.make()
        start_logging(folder.logs / "main.log", show=progress.note)
        folder.config.write_text(config.to_yaml())
        model = await obtain_model(config.model, config.seed, folder.logs, progress)
        async with aclosing(await Ledger.open(folder.ledger, create=True)) as ledger:
            await ledger.begin_incarnation(0)
            progress.phase("starting the engine")
            try:
                async with (
                    open_hosts(config.cluster, config.engine, config.rollout, shared=[model]) as hosts,
                    open_serving(
                        config,
                        preflight.workflow,
                        ledger,
                        workflow_path=preflight.workflow_path,
                        weights=model,
                        tokenizer=model,
                        version=WeightVersion(),
                        logs=folder.logs,
                        hosts=hosts,
                    ) as serving,
                ):
                    has_started = True
                    progress.phase("evaluating")
                    num_tasks = len(preflight.eval_tasks)
                    on_answer = _counting(progress, num_tasks)
                    report = await serving.evaluate(preflight.eval_tasks, "eval", on_answer, num_tasks)
                status = RunStatus.COMPLETED
                return report
            finally:
                await ledger.set_note(STATUS_NOTE, status)
    except BaseException as error:
        if not has_started:
            folder.give_up(keep_logs=not isinstance(error, ConfigError | asyncio.CancelledError))
        raise
    finally:
        progress.close()
