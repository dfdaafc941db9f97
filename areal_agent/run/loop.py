"""The main job: the training loop over a `Run`, its signals, and what it leaves behind.

    evaluate "before" ─▶ prepare_batch ─▶ train_step ─▶ push ─▶ evaluate_beside? ─▶ save? ─▶ ... ─▶ evaluate "after"
                              ▲                                                       │
                              └───────────────── until `steps` are done ──────────────┘

Rollouts go on in the background from the first `prepare_batch` on, which alone waits for them (see run.py).
Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 ends the loop cleanly: rollouts are cancelled, a checkpoint is published, and the
command that resumes is printed. A second one ends the process at once; the ledger and the last checkpoint stay as they
are.

On a cluster the death of the trainer ends the run's processes, all of them, and the run is resumed in this process as
`--resume` would do it (`cluster.restarts`), with as many ranks as there is room for.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from areal_agent.cluster.ray_hosts import ranks_that_fit
from areal_agent.command import report
from areal_agent.config import Config
from areal_agent.errors import (
    ArealAgentError,
    DiskFull,
    LedgerDamaged,
    LedgerError,
    RolloutsFailing,
    TakenOver,
    TrainerDied,
)
from areal_agent.files import RunFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import require_intact
from areal_agent.observe.metrics import Spent, evaluation_rows, read_metrics
from areal_agent.observe.progress import Progress
from areal_agent.process import INTERRUPTED_CODE, ended_by_signals, start_logging
from areal_agent.rollout.watchdog import watch_this_loop
from areal_agent.run.evaluation import told_success
from areal_agent.run.preflight import check_for_dry_run
from areal_agent.run.results import Outcome, RunStatus, closing_lines, write_report
from areal_agent.run.run import Run
from areal_agent.trainer.checkpoint import latest_checkpoint, newest_step

ANSWER_S = 0.5
"""The time that the event loop has to answer a signal, before the person hears what holds it up."""


def train(config_file: Path, overrides: Sequence[str], *, resume: str | None, is_dry: bool) -> int:
    """Train as a config says, or only check it, and return the exit code. Raises ArealAgentError."""
    config = Config.load(config_file, overrides)
    logging.captureWarnings(True)  # below the hook that rollouts have on warnings (rollout/unawaited.py)
    progress = Progress(total_steps=config.steps, mode="none" if is_dry else config.observe.progress)
    run = Run(config, name=config_file.stem, resume=resume, progress=progress)
    if is_dry:
        found = check_for_dry_run(run.preflight)
        print(f"{run.preflight.summary()}{found}")
        print(
            "dry run: nothing was started and no file was made. Not tried were memory, disk, sandboxes (also Docker), "
            f"engine and trainer: python -m areal_agent.doctor --config {config_file}"
        )
        return 0
    return asyncio.run(_train_and_exit(run))


class Interruption:
    """Turns the first signal that asks to end into one cancellation of a task; a second one ends the process.

    After `close`, the first signal is only noted: the run is ending anyway.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.happened = False
        self._is_closing = False
        self._note = note

    def close(self) -> None:
        self._is_closing = True

    def reopen(self) -> None:
        """Let the first signal cancel the task again."""
        self._is_closing = False

    @contextmanager
    def cancels(self, task: "asyncio.Task[int]") -> Generator[None]:
        loop, look, answered = asyncio.get_running_loop(), watch_this_loop(), threading.Event()

        def interrupt() -> None:
            if not self.happened and not self._is_closing:
                task.cancel()
            self.happened = True
            answered.set()

        def tell(name: str) -> None:
            blockage = None if answered.wait(ANSWER_S) else look()
            what = "ending once what is under way has ended"
            if blockage is not None:
                what = f"held up by {blockage.task or 'the event loop'} at {blockage.where}"
            self._note(f"interrupted ({name}): {what}; a second signal ends the run at once")

        with ended_by_signals(lambda: loop.call_soon_threadsafe(interrupt), tell):
            yield


async def _train_and_exit(run: Run) -> NoReturn:
    """Train and end the process, which would wait for ever for tasks and threads that a workflow has left behind."""
    try:
        code = await _train(run)
    except ArealAgentError as error:
        code = report(error)
    os._exit(code)


async def _train(run: Run) -> int:
    try:
        code, last_words = await _train_and_report(run)
    finally:
        run.progress.close()
    print(last_words, flush=True)
    return code


async def _train_and_report(run: Run) -> tuple[int, str]:
    """Run the loop under the signals. However it ends, the run folder says how."""
    task = asyncio.current_task()
    assert task is not None  # asyncio.run made one
    interruption = Interruption(run.progress.note)
    outcome = Outcome(
        num_eval_tasks=len(run.preflight.eval_tasks),
        engine_threads=run.config.engine.num_threads,
        is_online=run.config.is_online,
    )
    has_started, is_over = False, False
    restarts_left = run.config.cluster.restarts if run.config.cluster.kind == "ray" else 0
    try:
        with interruption.cancels(task):
            while not is_over:
                try:
                    async with run:
                        has_started = True
                        await _go_on(run, outcome, interruption, task)
                    is_over = True
                except TrainerDied as death:
                    if not has_started or interruption.happened or restarts_left == 0:
                        raise
                    restarts_left -= 1
                    interruption.reopen()
                    run = await _again(run, death, restarts_left)
            summary = write_report(run.folder, outcome)
    except asyncio.CancelledError:
        if not interruption.happened:
            raise
        if not has_started:  # a new run left no folder behind
            return INTERRUPTED_CODE, "interrupted before training started"
        return INTERRUPTED_CODE, f"interrupted; go on with: python -m areal_agent.train --resume {run.folder.path}"
    except ArealAgentError as error:
        if has_started:
            outcome.status, outcome.error, outcome.checkpoint = RunStatus.FAILED, str(error), run.checkpoint
            report_failure(run.folder, outcome, error, run.step)
        elif isinstance(error, LedgerDamaged):
            error.add_note(on_a_new_ledger(run.folder))
        raise
    return 0 if outcome.status is RunStatus.COMPLETED else INTERRUPTED_CODE, closing_lines(run.folder, summary)


async def _go_on(run: Run, outcome: Outcome, interruption: Interruption, task: "asyncio.Task[int]") -> None:
    """Learn until the steps are done or a signal comes, and wind up."""
    start_logging(run.folder.logs / "main.log", show=run.progress.note)
    outcome.status = RunStatus.FAILED
    try:
        await _learn(run, outcome)
        await asyncio.sleep(0)  # a signal that came with the last step is raised here, not below
        outcome.status = RunStatus.COMPLETED
    except asyncio.CancelledError:
        if not interruption.happened:
            raise
        task.uncancel()
        run.progress.note("saving a checkpoint")
        outcome.status = RunStatus.INTERRUPTED
    interruption.close()
    await wind_up(run, outcome)


async def _again(run: Run, death: TrainerDied, restarts_left: int) -> Run:
    """Return the run resumed from its last checkpoint, with as many ranks as there is room for. Raises ConfigError."""
    config, note = run.config, run.progress.note
    note(f"{str(death).splitlines()[0].partition('; the end of')[0]}; the run goes on from its last checkpoint")
    num_ranks = await ranks_that_fit(config.cluster, config.engine, config.rollout, config.trainer)
    step = newest_step(run.folder.checkpoints)
    note(
        f"going on {f'after step {step}' if step else 'from the start'} with {num_ranks} of {config.trainer.num_ranks} "
        f"ranks; cluster.restarts left: {restarts_left}"
    )
    return Run(config, resume=str(run.folder.path), progress=run.progress, num_ranks=num_ranks)


def report_failure(folder: RunFolder, outcome: Outcome, error: ArealAgentError, num_steps: int) -> None:
    """Write the report of a failed run and note how to go on; a full disk must not hide the error."""
    try:
        write_report(folder, outcome)
    except (OSError, ArealAgentError) as fault:
        if not isinstance(error, DiskFull):
            error.add_note(f"and the run's report could not be written: {fault}")
    try:
        require_intact(folder.ledger)  # as a resume would
    except LedgerDamaged as damage:
        error.add_note(f"{damage}\n{on_a_new_ledger(folder)}")
        return
    except LedgerError:  # what keeps a resume from it may be mended
        pass
    hint = "" if isinstance(error, TakenOver) else f"python -m areal_agent.train --resume {folder.path}"
    if isinstance(error, RolloutsFailing):
        error.add_note(f"every failure, with its traceback, is in {folder.logs / '*.log'}")
        hint = f"once the cause is mended, {hint}" if num_steps else ""  # without a step a new run loses nothing
    if hint:
        error.add_note(f"go on with: {hint}")


def on_a_new_ledger(folder: RunFolder) -> str:
    """Return how to go on where the ledger is damaged."""
    checkpoint = latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        return "there is no checkpoint to go on from: start a new run"
    return (
        "its checkpoints are whole; a new run, with a ledger of its own, may begin with the weights of the last one: "
        f"python -m areal_agent.train --config {folder.config} model={checkpoint.path} run_dir={folder.path}-again"
    )


async def _learn(run: Run, outcome: Outcome) -> None:
    """The paper's loop. Rollouts go on in the background from the first `prepare_batch` on."""
    outcome.earlier_wall_s = Spent.of(await asyncio.to_thread(read_metrics, run.folder.metrics)).wall_s
    await _grade_before(run, outcome)
    if run.preflight.is_evaluated:
        told = told_success(outcome.success_before, outcome.benchmarks_before)
        run.progress.note(f"success before training: {told or 'these tasks were not graded before the first step'}")
    if await is_evaluation_owed(run):
        run.evaluate_beside()
    while run.step < run.config.steps:
        batch = await run.prepare_batch()
        await run.train_step(batch)
        await run.push()
        if is_evaluation_due(run):
            run.evaluate_beside()
        if run.step % run.config.trainer.checkpoint_every == 0:
            await run.save()
    await run.stop_producing()
    await run.evaluation.finish()
    if run.preflight.is_evaluated:
        report = await run.evaluate("after")
        outcome.success_after, outcome.benchmarks_after = report.success, report.successes()
        run.progress.note(f"success after training: {told_success(report.success, report.successes())}")


async def _grade_before(run: Run, outcome: Outcome) -> None:
    """Set the successes before the first step, kept over restarts; those of other tasks were not graded then."""
    tasks, benchmarks = run.preflight.eval_tasks, run.preflight.benchmarks
    held_out, named = f"success_before, {len(tasks)} tasks", f"benchmarks_before, {', '.join(map(str, benchmarks))}"
    outcome.success_before = await run.ledger.ask(questions.note, held_out)
    outcome.benchmarks_before = await run.ledger.ask(questions.note, named) or {}
    is_missing = (tasks and outcome.success_before is None) or (benchmarks and not outcome.benchmarks_before)
    if is_missing and run.step == 0:
        report = await run.evaluate("before")
        outcome.success_before, outcome.benchmarks_before = report.success, report.successes()
        await run.ledger.set_note(held_out, report.success)
        await run.ledger.set_note(named, report.successes())


def is_evaluation_due(run: Run) -> bool:
    """Return whether the step just pushed is a multiple of `eval.every`. The last step has the one after training."""
    every = run.config.eval.every
    return every > 0 and run.step % every == 0 and run.step < run.config.steps


async def is_evaluation_owed(run: Run) -> bool:
    """Return whether the last evaluation due before a restart has no result: it was cancelled, or its process died."""
    every = run.config.eval.every
    due = run.step - run.step % every if every > 0 else 0
    if not 0 < due <= run.step < run.config.steps:
        return False
    rows = evaluation_rows(await asyncio.to_thread(read_metrics, run.folder.metrics))
    return not any(row["label"] == f"step{row['step']}" and due <= row["step"] <= run.step for row in rows)


async def wind_up(run: Run, outcome: Outcome) -> None:
    """Stop rolling out, publish the last checkpoint, and give trajectories a fate or leave them for a resume."""
    await run.stop_producing()
    await run.evaluation.cancel()
    if run.version.step < run.step:
        await run.push()  # interrupted between step and push: the step counts, and its row is written
    await run.save()
    outcome.checkpoint = await run.saved()
    await run.settle(is_completed=outcome.status is RunStatus.COMPLETED)
    outcome.tokens, outcome.ledger = await run.source.count_tokens(), run.source.ledger_elsewhere
