"""One run: builds every part, owns the tasks of the event loop, and is the Python API of the asynchronous trainer.

    main process                                                          trainer process
    ┌────────────────────────────────────────────────────────────────┐    ┌──────────────┐
    │ tasks ─▶ admit loop ─▶ rollouts ─▶ buffer ─▶ prepare_batch ────┼───▶│ train_step   │
    │              ▲             │ HTTP                              │    │     ▼        │
    │              │             ▼                                   │    │  publish     │
    │              │          gateway ─▶ ledger       push ◀─────────┼────┤     │        │
    │              └─ version ───┼─────────────────────┤             │    └─────┼────────┘
    └────────────────────────────┼─────────────────────┼─────────────┘          │
                            HTTP │                     │ pause, swap, resume    │ weights (memory or disk)
                                 ▼                     ▼                        ▼
                         ┌──────────────────────── engine process ─────────────────────┐
                         │       samples under the newest weights swapped in           │
                         └─────────────────────────────────────────────────────────────┘

With `rollout.workers`, rollouts and gateways run in worker processes. One TaskGroup owns all tasks of the event loop:
the admit loop (waits for the staleness bound and for rollout slots; unblocks `prepare_batch`), a task per group, the
evaluation beside training, and watchers that end the run when its engine, rollouts or trainer die. Rollouts go on while
`train_step`, `push` and `save` run; only the staleness bound waits for the slowest rollout.
"""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from areal_agent.cluster.engines import engine_weights
from areal_agent.cluster.gang import start_trainer
from areal_agent.cluster.local import (
    folder_in,
    obtain_model,
    require_same_tokenizer,
    weights_folder,
)
from areal_agent.cluster.ray_hosts import open_hosts
from areal_agent.config import Config
from areal_agent.engine.config import may_be_on, may_open_memory
from areal_agent.errors import (
    ArealAgentError,
    ConfigError,
    DiskFull,
    EngineError,
    LedgerError,
    ProcessDied,
    TrainerError,
)
from areal_agent.files import RunFolder
from areal_agent.images import ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.encoding import StepRecord
from areal_agent.ledger.ledger import Ledger
from areal_agent.models.recipe import demonstrations_of
from areal_agent.observe.progress import Progress
from areal_agent.observe.trackers import TrackedRun, Trackers, require_installed, start_trackers
from areal_agent.process import uninterrupted
from areal_agent.run.evaluation import Evaluation
from areal_agent.run.preflight import (
    Preflight,
    check_context,
    check_model_folder,
    idle_clip,
    require_sampling,
    require_trainable,
)
from areal_agent.run.recorded import TrainerRecord
from areal_agent.run.results import RunMetrics, RunStatus
from areal_agent.run.serving import EvalReport
from areal_agent.run.sources import Beginning, Source, begin, open_online_rollouts, open_own_rollouts
from areal_agent.run.survival import Survival, restore
from areal_agent.run.teacher import obtain_teacher, open_teacher
from areal_agent.threads import is_on_cpu
from areal_agent.tokens.renderer import exported_template
from areal_agent.trainer.checkpoint import FailedSaves
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.wire import SaveEnd, StepReport
from areal_agent.types import RolloutBatch, Task, WeightVersion
from areal_agent.weights.push import PushReport, publish_and_push, push_under

NOTHING: Mapping[str, float] = {}

SAVE_POLL_S = 0.2
"""The time between two questions whether a save has ended. The trainer answers them between its steps."""

WATCHER_GRACE_S = 1.0
"""The longest wait of a failed call for the news that its process has died; longer by `lost_after_s` on a cluster."""


class Run:
    """A run as an async context manager: inside, rollouts are produced and weights are served.

    ::

        async with Run(config, workflow=solve) as run:
            while run.step < config.steps:
                batch = await run.prepare_batch()
                await run.train_step(batch)
                await run.push()

    While it is open, `source` gives the batches, `ledger` keeps notes over restarts, and `evaluation` rolls out the
    held-out tasks. Leaving ends every process of the run, however it is left. Raises ConfigError before anything is
    started, ProcessDied when the engine or the trainer ends by itself, RolloutsFailing when nothing can be trained.
    """

    def __init__(
        self,
        config: Config,
        *,
        workflow: object = None,
        name: str = "run",
        resume: str | None = None,
        progress: Progress | None = None,
        num_ranks: int | None = None,
    ) -> None:
        """`num_ranks` replaces `trainer.num_ranks` for this time, where fewer found room."""
        self.preflight = Preflight.check(config, workflow=workflow, name=name, resume=resume)
        require_sampling(config)
        require_installed(config.observe.trackers)
        self.config = config = self.preflight.config
        self.folder = self.preflight.folder
        self.version = WeightVersion()  # the version that serves
        self.step = 0  # train steps done
        self.progress = progress or Progress(total_steps=config.steps, mode="none")
        self._trainer_config = config.trainer if num_ranks is None else config.trainer.of_size(num_ranks)
        self._stack = AsyncExitStack()
        self._metrics = RunMetrics(
            self.progress,
            config.eval.success_reward,
            self.preflight.tasks.source_names(),
            algorithm=config.algorithm,
            rule=config.rollout.loss_rule,
        )
        self.checkpoint: Path | None = None  # the last one that this process has published
        self._failed_saves = FailedSaves(self.folder.checkpoints)
        self._saving: asyncio.Task[None] | None = None
        self._producing: asyncio.Task[None] | None = None
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            with self._metrics.during("starting"):
                await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            if not self.preflight.is_resumed:
                self.folder.give_up(keep_logs=not isinstance(error, ConfigError | asyncio.CancelledError))
            raise
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._watchers and isinstance(exc_info[1], EngineError | TrainerError | ProcessDied):
            await self._let_watchers_tell()
        try:
            await self._stack.__aexit__(*exc_info)
        except BaseExceptionGroup as group:
            raise _cause(group) from group

    # ------------------------------------------------------------------ the loop's four calls

    async def prepare_batch(self) -> RolloutBatch:
        """Asynchronous: return the oldest `batch_size` finished groups within the bound, leased for the next step.

        The first call starts the admit loop. Waits until there are enough groups.
        """
        await self._metrics.begin_steps(self.version)
        if self._producing is None:
            self._producing = self._spawn(self.source.produce(), "admit loop")
        with self._metrics.during("waiting_for_rollouts"):
            return await self.source.take(self.step + 1)

    async def rollout_batch(self, tasks: Sequence[Task]) -> RolloutBatch:
        """Synchronous: roll out exactly these tasks under the weights that serve now, leased for the next step."""
        await self._metrics.begin_steps(self.version)
        with self._metrics.during("waiting_for_rollouts"):
            return await self.source.roll_out(self.step + 1, tasks)

    async def train_step(self, batch: RolloutBatch) -> StepReport:
        """Make one train step in the trainer process. A cancellation is raised only after the step has ended.

        A teacher's server scores the batch first; that wait can be cancelled.
        """
        if self._teacher is None:
            return await uninterrupted(self._train_step(batch))
        began_s = time.monotonic()
        with self._metrics.during("waiting_for_teacher"):
            scores = await self._teacher.score(batch.records)
        return await uninterrupted(self._train_step(batch, scores, {"seconds_teacher": time.monotonic() - began_s}))

    async def push(self) -> PushReport:
        """Publish the trainer's weights as the next version and swap them into the engine, mid-sentence."""
        return await uninterrupted(self._push())

    async def _train_step(
        self,
        batch: RolloutBatch,
        teacher: Sequence[NDArray[np.float32]] | None = None,
        metrics: Mapping[str, float] = NOTHING,
    ) -> StepReport:
        with self._metrics.during("training"):
            async with self.source.memory_lent():
                report = await self._trainer.train_step(
                    batch, incarnation=self.version.incarnation, teacher=teacher, images=await self._images_of(batch)
                )
        report = replace(report, metrics={**report.metrics, **metrics})
        self.step = batch.step
        await self.ledger.record_step(
            StepRecord(
                step=batch.step,
                process=self._process,
                incarnation=self.version.incarnation,
                sessions=tuple(dict.fromkeys(record.session_id for record in batch.records)),
                inputs=report.inputs,
                weights=report.weights,
                teacher=None if teacher is None else np.concatenate([np.zeros(0, dtype=np.float32), *teacher]),
            )
        )
        self._metrics.trained(batch, report)
        return report

    async def _images_of(self, batch: RolloutBatch) -> Mapping[str, bytes]:
        """Return the files of a batch's images. Raises LedgerError for one that is gone, ConfigError where none are."""
        if not any(record.images for record in batch.records):
            return {}
        if self.config.is_online:
            raise ConfigError(
                "rollout.gateway_url: agents sent images, which stay on the disk of that gateway; "
                "train on them in a run with rollouts of its own, or send text alone"
            )
        return await asyncio.to_thread(ImageFolder(self.folder.images).of, batch.records)

    async def _push(self) -> PushReport:
        version = WeightVersion(incarnation=self.version.incarnation, step=self.step)
        with self._metrics.during("pushing"):
            report = await self._swap(version)
        # a pause that waits for answers to end holds up nothing while it waits
        is_held = self.config.engine.on_push == "interrupt"
        await self._metrics.pushed(report, held_s=report.stall_s if is_held else report.stall_s - report.pause_s)
        return report

    async def _swap(self, version: WeightVersion) -> PushReport:
        await self._survival.pushing(version.step)
        policy, engines, drained = self.config.engine.on_push, [self.source.engine], self.source.drained
        report = await publish_and_push(
            self._trainer.publish, lambda weights: push_under(policy, engines, weights, version, drained=drained)
        )
        self.version = version
        await self.source.publish(version)
        return report

    # ------------------------------------------------------------------ evaluation, checkpoints, the end

    async def evaluate(self, label: str) -> EvalReport:
        """Roll out held-out tasks and benchmarks under the weights that serve now; the same seeds each time.

        Its sessions are in the ledger as `eval-<label>-...` and are never trained.
        """
        return await self.evaluation.run(label, self.version)

    def evaluate_beside(self) -> bool:
        """Begin an evaluation beside rollouts, training and pushes. Return False while an earlier one is under way.

        Its result is in metrics.jsonl when it ends, with the number of answers by each weight version.
        """
        return self.evaluation.begin(self.version, self._spawn)

    async def save(self) -> Path | None:
        """Publish a checkpoint of the steps done; only then are their trajectories `trained`. Rollouts go on.

        Beside training (`trainer.async_save`) this returns None once the save before has ended and this one goes on by
        itself, which `saved` waits for. A disk that fails is told, and None returned; raises TrainerError the third
        time in a row.
        """
        return await uninterrupted(self._save())

    async def saved(self) -> Path | None:
        """Wait until no save is under way, and return the last checkpoint. Raises TrainerError if that save failed."""
        await uninterrupted(self._none_under_way())
        self._failed_saves.check()
        return self.checkpoint

    async def _save(self) -> Path | None:
        with self._metrics.during("saving"):
            await self._none_under_way()
            state = await self.source.state(self.step)
            try:
                await self._survival.saving(self.step)
            except (OSError, LedgerError, DiskFull) as error:
                return await self._commit(self.step, SaveEnd(fault=str(error)))
            ended = await self._trainer.save(
                self.folder.checkpoints, step=self.step, incarnation=self.version.incarnation, run_state=state
            )
            if ended is not None:
                return await self._commit(self.step, ended)
        self._saving = self._spawn(self._follow_save(self.step), "asynchronous save")
        return None

    async def _none_under_way(self) -> None:
        if self._saving is not None:
            await self._saving
            self._saving = None

    async def _follow_save(self, step: int) -> None:
        ended = None
        while ended is None:
            await asyncio.sleep(SAVE_POLL_S)
            ended = await self._trainer.saved()
        await self._commit(step, ended)

    async def _commit(self, step: int, ended: SaveEnd) -> Path | None:
        if ended.path is None:
            self._metrics.save_failed()
            self.progress.note(self._failed_saves.add(step, ended.fault or ""))
            return None
        await self.source.commit(step, ended.path)
        self._failed_saves.clear()
        self.checkpoint = ended.path
        return ended.path

    async def stop_producing(self) -> None:
        """End the admit loop and every rollout under way; unfinished ones are recorded as `cancelled`."""
        if self._producing is not None:
            self._producing.cancel()
            await asyncio.wait({self._producing})
            self._producing = None
        self._metrics.end_steps()

    async def settle(self, *, is_completed: bool) -> None:
        """Give unfinished rollouts their fate; with `is_completed` finished ones too, since nobody will train them.

        Raises TrainerError if the last save failed.
        """
        await self.saved()
        await self.source.settle(is_completed=is_completed)
        status = RunStatus.COMPLETED if is_completed else RunStatus.INTERRUPTED
        await self.ledger.set_note(questions.STATUS_NOTE, status)
        await self._metrics.end_time(self.version)

    # ------------------------------------------------------------------ building

    async def _start(self) -> None:
        config, folder = self.config, self.folder
        if self.preflight.is_resumed and not folder.ledger.exists():
            self.progress.note(await asyncio.to_thread(restore, folder))
        folder.make()
        self.ledger = await Ledger.open(folder.ledger, create=not self.preflight.is_resumed)
        self._stack.push_async_callback(self.ledger.aclose)  # the lock is ours: now the folder may be changed
        if not self.preflight.is_resumed:
            folder.keep_config(config.to_yaml())
        model = await model_of_run(config.model, config.seed, folder, self.progress)
        check_model_folder(model, config.engine)
        check_context(config, model)
        await asyncio.to_thread(require_trainable, model, config.engine)
        beginning = await begin(self.ledger, folder.checkpoints)
        teacher = await obtain_teacher(config, model, folder.logs, self.progress)
        self._teacher = await self._stack.enter_async_context(open_teacher(config, model, self.progress.note))
        self._stack.push_async_exit(self._note_failure)
        if beginning.checkpoint is not None:
            require_same_tokenizer(model, beginning.checkpoint.path)
        self.version, self.step = beginning.version, beginning.version.step
        self._process = beginning.version.incarnation  # its number in the ledger
        self._survival = Survival(folder, self.ledger, self.version.incarnation)
        self._metrics.open(folder.metrics, await self._open_trackers())
        self._stack.push_async_callback(self._metrics.aclose)
        if idle := idle_clip(config):
            self.progress.note(idle)
        if self.preflight.is_resumed:
            whence = f"after step {self.step}" if beginning.checkpoint else "with the first step, without a checkpoint"
            self.progress.note(f"resumes {whence}; finished rollouts are kept")
        await self._start_processes(model, beginning, teacher)
        await self._metrics.connect(self.source, self._gang.process_ids)
        self.evaluation = Evaluation(
            self.preflight.eval_tasks,
            self.preflight.benchmarks,
            source=self.source,
            metrics=self._metrics,
            progress=self.progress,
            max_concurrent=max(1, config.rollout.max_concurrent // 4),
        )
        if config.is_online:  # replace whatever weights its engine has served until now
            await self._swap(await self._unused_version())
        if self.preflight.is_resumed:  # only now: settings that cannot be resumed with must not replace those that can
            folder.keep_config(config.to_yaml())
        await self._start_watching()

    async def _note_failure(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception):
            with contextlib.suppress(LedgerError):  # the error that is raised says more
                await self.ledger.set_note(questions.STATUS_NOTE, RunStatus.FAILED)

    async def _open_trackers(self) -> Trackers:
        run_id = await self.ledger.ask(questions.note, "tracked_run")
        if run_id is None:
            run_id = secrets.token_hex(4)
            await self.ledger.set_note("tracked_run", run_id)
        tracked = TrackedRun(
            id=run_id,
            name=self.folder.path.resolve().name,
            project=self.config.observe.project,
            folder=self.folder.path,
            config=self.config.model_dump(mode="json"),
            first_step=self.step + 1,
        )
        return start_trackers(self.config.observe.trackers, tracked)

    async def _unused_version(self) -> WeightVersion:
        """Return the current version in an incarnation that the engine elsewhere has not served for other runs.

        Answers under way there go on under these weights, and their versions may not go back.
        """
        served = (await self.source.engine.info()).weight_version
        number = self.version.incarnation
        if served >= self.version:  # its weights under that label may be others
            number = served.incarnation + 1
        earlier = await self.ledger.ask(questions.note, "incarnation")
        if earlier is not None:
            number = max(number, earlier + 1)
        await self.ledger.set_note("incarnation", number)
        return replace(self.version, incarnation=number)

    async def _start_processes(self, model: Path, beginning: Beginning, teacher: Path | None) -> None:
        config, folder, checkpoint = self.config, self.folder, beginning.checkpoint
        of_trainer = self._trainer_config
        self.progress.phase("starting the trainer" if config.is_online else "starting engine and trainer")
        weights = checkpoint.path if checkpoint else model
        shared = [folder.shared, model] if teacher is None else [folder.shared, model, teacher]
        hosts = await self._stack.enter_async_context(
            open_hosts(config.cluster, config.engine, config.rollout, of_trainer, shared=shared)
        )
        shared_memory = self._stack.enter_context(
            weights_folder(in_memory=config.trainer.transfer == "shared_memory")
            if config.cluster.kind == "local"
            else folder_in(folder.shared.absolute())
        )
        begun_with = checkpoint.path if checkpoint else None
        served = await asyncio.to_thread(engine_weights, config.trainer, model, begun_with, shared_memory)
        self._gang = await self._stack.enter_async_context(start_trainer(of_trainer.num_threads, folder.logs, hosts))
        self._trainer = self._gang.client

        is_local = config.cluster.kind == "local"
        setup = TrainerSetup(
            model=weights,
            base=model,
            teacher=teacher,
            trainer=of_trainer,
            algorithm=config.algorithm,
            seed=config.seed,
            shared_memory=shared_memory,
            resume=checkpoint is not None,
            num_steps=config.steps,
            token_records=folder.token_records,
            token_records_share=config.observe.token_records,
            has_one_gpu=hosts.chooses_gpus,
            may_open_memory=is_local and may_open_memory(config.engine, config.trainer.num_ranks),
            shares_gpu=is_local and may_be_on(config.engine, config.trainer.num_ranks),
        )
        engine = config.engine  # on a cluster its servers are placed first; and its room may be what memory is free
        has_own_room = engine.leave_gib is None and (is_on_cpu(engine.device) or engine.kv_tokens is not None)
        loading = asyncio.create_task(self._load(model, setup)) if is_local and has_own_room else None
        try:
            self.source: Source = await self._stack.enter_async_context(
                open_online_rollouts(config, self.ledger, self.step)
                if config.is_online
                else open_own_rollouts(
                    self.preflight, self.ledger, hosts, weights=served, tokenizer=model, beginning=beginning
                )
            )
            await (loading or self._load(model, setup))
        except BaseException:
            if loading is not None:  # the engine's failure is told
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            raise

    async def _load(self, model: Path, setup: TrainerSetup) -> None:
        """Have the trainer load its model, on one machine while the engine starts, and record what it is."""
        config, limit_s = self.config, self.config.trainer.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                template = await asyncio.to_thread(
                    exported_template, model, config.rollout.history_thinking, config.rollout.tool_format
                )
                setup = setup.model_copy(update={"chat_template": template})
                info = await self._gang.init(setup)
        except TimeoutError:
            raise TrainerError(
                f"the trainer did not load its model within trainer.startup_timeout_s = {limit_s:g}; "
                f"see {self.folder.logs / 'trainer.log'}"
            ) from None
        record = TrainerRecord.of(config, setup, info)
        await self.ledger.set_trainer(self._process, record.model_dump(mode="json"))

    async def _start_watching(self) -> None:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._children: list[asyncio.Task[None]] = []
        self._stack.callback(self._cancel_children)
        self._stack.push_async_exit(self._finish_save)
        failures = {"trainer": self._gang.died(), **self.source.failures()}
        self._watchers = [self._spawn(_raise(failure), f"watcher of the {name}") for name, failure in failures.items()]

    async def _finish_save(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            await self.saved()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._tasks.create_task(work, name=name)
        self._children.append(task)
        return task

    async def _let_watchers_tell(self) -> None:
        """Give the watchers time to report a dead process: that explains the failed call better."""
        cluster = self.config.cluster
        grace_s = WATCHER_GRACE_S if cluster.kind == "local" else WATCHER_GRACE_S + cluster.lost_after_s
        with contextlib.suppress(asyncio.CancelledError):  # the TaskGroup cancels this task when a watcher raises
            await asyncio.wait(self._watchers, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)

    def _cancel_children(self) -> None:
        for task in self._children:
            task.cancel()


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that explains the end of the run: a process that died, an ArealAgentError, or the first."""
    error: BaseException = group.subgroup(ProcessDied) or group.subgroup(ArealAgentError) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _raise(failure: Awaitable[ArealAgentError]) -> None:
    raise await failure


async def model_of_run(model: str, seed: int, folder: RunFolder, progress: Progress) -> Path:
    """Return the model's folder. A tiny model is copied into the run's folder, so a resume never builds another.

    Raises ConfigError and ProcessDied as `obtain_model` does.
    """
    is_tiny = demonstrations_of(model) is not None
    if is_tiny and folder.model.is_dir():
        return folder.model
    found = await obtain_model(model, seed, folder.logs, progress)
    if not is_tiny:
        return found
    half = folder.shared / ".model"
    await asyncio.to_thread(shutil.copytree, found, half, dirs_exist_ok=True)
    return half.rename(folder.model)
