"""A story: one run on simulated machines from its start to its end, with faults on the way, and what broke.

    life 1 ─▶ (it is killed, or ends with an error that it may have) ─▶ life 2, resumed ─▶ ... ─▶ completed
       ▲ faults, each some seconds after the one before                              └─▶ are the promises kept?

After the last fault everything recovers; then the run has to complete. A promise that is seen broken ends the story.
"""

import asyncio
import contextvars
import copy
import errno
import gc
import logging
import math
import random
import sqlite3
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import orjson

from areal_agent.callback import LOOPBACK
from areal_agent.cluster import ray_hosts
from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.hosts import Hosts
from areal_agent.cluster.ray_hosts import RayHosts, needs_of
from areal_agent.config import Config
from areal_agent.engine.address import EngineAddress
from areal_agent.errors import DiskFull, EngineError, ProcessDied, TakenOver, TrainerError
from areal_agent.models.recipe import END, train_tokenizer
from areal_agent.rollout import local
from areal_agent.rollout import worker as worker_process
from areal_agent.run import loop as run_loop
from areal_agent.run import run as run_module
from areal_agent.run.results import Outcome, RunStatus
from areal_agent.run.run import Run
from areal_agent.run.sources import OwnRollouts, Source
from areal_agent.storm import programs
from areal_agent.storm.cluster import Cluster
from areal_agent.storm.faults import KINDS, Fault
from areal_agent.storm.machine import (
    BEFORE_A_COMMIT,
    PROGRAM,
    Deadlock,
    Program,
    SimulatedHosts,
    SimulatedLoop,
    SimulatedProcess,
    WallClock,
    WriterAtOnce,
    simulated,
)
from areal_agent.storm.programs import Network, Stopped, StormEngine, engine_main, trainer_main
from areal_agent.storm.truth import LETTERS, Truth, broken_promises
from areal_agent.trainer.checkpoint import CommitPoint, latest_checkpoint

CALM_S = 120.0
"""The time after the last fault until everything that was stopped, cut off or full has recovered."""
LOOK_S = 5.0
"""The time between two looks at whether a promise was broken."""
REPLACED_S = 75.0
"""The time in which a process that was replaced ends: two leases of its starter, as it may sleep through one."""
MOVED_S = 180.0
"""The time in which a server's new URL is asked instead of its old one, though calls of a push hang."""
CALM_STEPS = 2
"""The train steps that the run makes after that before it ends."""
END_S = 2 * 3600.0
MAX_LIVES_AFTER = 3
"""The time, and the number of new processes, in which a run has to complete after that: it is 0 or 1 as a rule."""

EXPLAINED = (DiskFull, EngineError, ProcessDied, TrainerError)
"""The errors that faults may end a run with: of its disk, engines, processes and saves. Others are a promise broken."""

CHECKPOINT_EVERY = 2
SETTINGS = {
    "workflow": "areal_agent.storm.programs:act",
    "steps": 10**6,
    "batch_size": 2,
    "group_size": 2,
    "eval": {"num_tasks": 2},
    "rollout": {"workers": 2, "max_concurrent": 12, "timeout_s": 120, "max_failed_groups": 1000},
    "engine": {"num_servers": 2, "max_context_tokens": programs.CONTEXT_TOKENS, "wait_s": 300},
    "cluster": {},
    "trainer": {"transfer": "disk", "checkpoint_every": CHECKPOINT_EVERY},
    "observe": {"progress": "none"},
}
VARIED = {
    "rollout.workers": (0, 2),
    "engine.on_push": ("interrupt", "turn_boundary", "drain"),
    "trainer.async_save": (False, True),
    "max_staleness": (0, 1, 2, 4),
    "straggler": ("wait", "drop", "mask"),
    "cluster.kind": ("local", "ray"),
    "eval.every": (0, 3),
}
"""What differs from story to story."""
NUM_TASKS = 50


def settings_of(seed: int) -> tuple[dict[str, Any], str]:
    """Return the settings of a story's run, and those that are its own in words."""
    drawn = random.Random(f"settings of {seed}")
    settings: dict[str, Any] = copy.deepcopy(SETTINGS)
    chosen = {name: drawn.choice(values) for name, values in VARIED.items()}
    for name, value in chosen.items():
        section, _, key = name.rpartition(".")
        (settings[section] if section else settings)[key] = value
    return settings, ", ".join(f"{name}={value}" for name, value in chosen.items())


class _Unexpected(logging.Handler):
    """Makes a broken promise of each exception that a program or the loop logs and that no fault explains.

    A gateway logs whatever it answers with status 500, and a trainer that outlives its run on a node that is cut off
    that the run was taken over.
    """

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self._truth = truth

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None and record.name == "asyncio":
            self._truth.faults.append(f"the event loop has an error: {record.getMessage()}")
        elif isinstance(error, Exception) and not isinstance(error, TakenOver) and not is_explained(error):
            self._truth.faults.append(described(error))


def is_explained(error: Exception) -> bool:
    """Return whether faults may have caused it. A worker elsewhere may outlive its run, and then writes nothing."""
    return isinstance(error, EXPLAINED) or str(error) == worker_process.GONE


def described(error: Exception) -> str:
    """Return an exception in one line, with the last line of the project that it passed."""
    own = [one for one in traceback.extract_tb(error.__traceback__) if "areal_agent" in Path(one.filename).parts]
    where = f"; {Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    return f"an unexpected {type(error).__name__}: {error}{where}"


class Broken(Exception):
    """A story cannot go on: its message is the broken promise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """How a story went. `broken` are the promises that were not kept."""

    seed: int
    faults: Sequence[Fault]
    broken: Sequence[str]
    lines: Sequence[str]  # what happened, in order
    struck: Counter[str]  # by kind
    num_lives: int
    num_steps: int
    num_answers: int


def tell(seed: int, faults: Sequence[Fault]) -> Told:
    """Play a story. It takes this process for itself, clocks and threads included, and blocks for seconds."""
    random.seed(seed)
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="storm-") as folder, simulated(seed) as (loop, clock):
        story = Story(Path(folder), seed, loop, clock)
        with story.in_place(), _logging_to(_Unexpected(story.truth)):
            try:
                loop.run_until_complete(story.play(faults))
                broken += story.broken_promises()
            except Deadlock:
                broken.append("nothing is ready, no timer is set, and the run goes on: it waits for ever")
            except Broken as end:
                broken.append(str(end))
        return Told(
            seed=seed,
            faults=faults,
            broken=[*dict.fromkeys(story.truth.faults), *broken],  # one that comes in each life is told once
            lines=story.lines,
            struck=story.struck,
            num_lives=story.num_lives,
            num_steps=story.num_steps,
            num_answers=len(story.truth.answers),
        )


@contextmanager
def _logging_to(handler: logging.Handler) -> Generator[None]:
    """Inside, errors that are logged go to `handler` alone, and warnings nowhere."""
    root = logging.getLogger()
    disabled = root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), mock.patch.object(root, "handlers", [handler]):
            yield
    finally:
        logging.disable(disabled)


class Story:
    """The `faults.Machines` of one run, which starts it again whenever it has ended too early."""

    def __init__(self, folder: Path, seed: int, loop: SimulatedLoop, clock: WallClock) -> None:
        self.network = Network()
        self.full_until_s = self.slow_until_s = self.no_saves_until_s = 0.0
        self.num_lives = self.num_steps = 0
        self.struck: Counter[str] = Counter()
        self.lines: list[str] = []
        self._folder, self._loop, self._clock = folder, loop, clock
        model, tasks = folder / "model", folder / "tasks.jsonl"
        tokenizer = train_tokenizer([], vocab_size=programs.VOCAB_SIZE)
        self._letters = {letter: _id_of(tokenizer, letter) for letter in LETTERS}
        tokenizer.save_pretrained(model)
        programs.write_model(model)
        tasks.write_bytes(b"\n".join(orjson.dumps({"id": str(number)}) for number in range(NUM_TASKS)))
        files = {"model": str(model), "tasks": str(tasks), "run_dir": str(folder / "run")}
        settings, varied = settings_of(seed)
        settings["eval"]["tasks"] = str(tasks)
        self._config = Config.parse({**settings, **files, "seed": seed})
        self.truth = Truth(max_staleness=self._config.max_staleness)
        programs.truth_now[:] = [self.truth]
        self._say(f"a run with {varied}")
        engine = engine_main(self.truth, self.network, self._letters, end_id=_id_of(tokenizer, END))
        self._hosts = SimulatedHosts(
            {
                "areal_agent.engine": engine,
                "areal_agent.trainer": trainer_main(self.truth, self._pass, self._try_the_disk, self._disk_delay_s),
                "areal_agent.rollout.worker": lambda argv, sock: worker_process.work(sock),
            }
        )
        self.cluster = Cluster(self.truth)
        self._ray = self.cluster.module()
        self._replaced_s: dict[SimulatedProcess, float] = {}  # since when a process runs that was replaced
        self._differing_s: dict[str, float] = {}  # since when a URL is asked or kept, and not both
        self._storm: asyncio.Task[None] | None = None
        self._main = Program("main")
        self._main_task: asyncio.Task[None] | None = None
        self._is_interrupted = False
        self._life_over: asyncio.Future[str] = loop.create_future()
        # The point at which the run dies, how often it is passed before, and what is called then.
        self._death: tuple[str, int, Callable[[], object]] | None = None

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, a run that starts gets the hosts, the network and the disk of this story."""

        @asynccontextmanager
        async def open_hosts(cluster: ClusterConfig, *given: Any, **_: object) -> AsyncGenerator[Hosts]:
            if cluster.kind == "local":
                yield self._hosts
                return
            hosts = RayHosts(self._ray, cluster, LOOPBACK, [])
            await hosts.reserve(needs_of(cluster, *given, has_gpus=False))
            try:
                yield hosts
            finally:
                hosts.give_back()

        def connect(address: EngineAddress) -> Any:
            return self.network.connect(address)

        def no_watchdog(**_: object) -> Any:  # it watches by a thread
            return nullcontext(mock.Mock(blocked_s=0.0))

        def no_warnings(channel: object) -> logging.Handler:  # all programs have one log, where they would go round
            return logging.NullHandler()

        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(sys.modules, {"ray": self._ray, "ray.util": self._ray.util}))
            for where, name, value in (
                (EngineAddress, "connect", connect),
                (run_module, "open_hosts", open_hosts),
                (ray_hosts, "ManagedProcess", self._hosts),
                (local.Watchdog, "of_this_loop", no_watchdog),
                (worker_process, "_WarningsToMain", no_warnings),
                (WriterAtOnce, "look", staticmethod(self._look)),
                (WriterAtOnce, "delay_s", staticmethod(self._disk_delay_s)),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            yield

    # ------------------------------------------------------------------------------------------------ lives

    async def play(self, faults: Sequence[Fault]) -> None:
        """Live until the run has completed, or a promise was seen broken. Raises Broken, and Deadlock."""
        self._storm = asyncio.create_task(self._strike_all(faults))
        end, lives_after, deadline_s = "", 0, math.inf
        while end != RunStatus.COMPLETED and not self.truth.faults:
            if self._storm.done():
                self._storm.result()
                lives_after += 1
            if lives_after > MAX_LIVES_AFTER:
                raise Broken(f"the run has not completed in {MAX_LIVES_AFTER} lives after the last fault: {end}")
            self._begin_life()
            while not self._life_over.done():
                await asyncio.wait({self._life_over}, timeout=LOOK_S)
                self._look_for_replaced()
                if self.truth.faults:
                    return
                if self._storm.done():
                    deadline_s = min(deadline_s, self.now_s + END_S)
                if self.now_s > deadline_s:
                    raise Broken(f"the run has not completed {END_S:g} s after the last fault: {self.num_steps} steps")
            end = self._life_over.result()
            self._say(f"process {self.num_lives} of the run ends after step {self.num_steps}: {end}")
            await asyncio.sleep(1.0)

    def broken_promises(self) -> list[str]:
        """Return which promises the ledger breaks, once everything has ended."""
        gc.collect()  # a task that failed, and for which nobody waited, says so as it is collected
        if self.truth.faults:
            return []
        run = self._folder / "run"
        checkpoint = latest_checkpoint(run / "checkpoints")
        lineage = programs.lineage_in(checkpoint.path) if checkpoint else []
        left = [f"the {one.name} is left behind" for one in self._hosts.started if one.is_running]
        return left + broken_promises(self.truth, run / "ledger.sqlite", lineage, self._letters)

    def _look_for_replaced(self) -> None:
        """Hold that a process ends soon once there is another one in its place, while it is not stopped."""
        newest = {one.name: one for one in self._hosts.started}
        replaced = [one for one in self._hosts.started if one.is_running and one is not newest[one.name]]
        awake = [one for one in replaced if not one.program.is_stopped]
        self._replaced_s = {one: self._replaced_s.get(one, self.now_s) for one in awake}
        for one, since_s in self._replaced_s.items():
            if self.now_s - since_s > REPLACED_S:
                self.truth.faults.append(f"the {one.name} still runs {REPLACED_S:g} s after it was replaced")

    def _begin_life(self) -> None:
        self.num_lives += 1
        self._main, self._life_over = Program("main"), self._loop.create_future()
        context = contextvars.Context()
        context.run(PROGRAM.set, self._main)
        self._is_interrupted = False
        self._main_task = self._loop.create_task(self._live(self._life_over), name="main", context=context)

    async def _live(self, over: "asyncio.Future[str]") -> None:
        """Be the main process of the run: start it or go on with it, and tell how it ended."""
        try:
            over.set_result(await self._train())
        except asyncio.CancelledError:
            over.set_result("it was interrupted before training started")
        except Exception as error:
            if not is_explained(error):
                self.truth.faults.append(described(error))
            over.set_result(f"{type(error).__name__}: {error}")

    async def _train(self) -> RunStatus:
        """Train as `run.loop` does, until the storm is over."""
        folder = self._folder / "run"
        is_begun = (folder / "ledger.sqlite").exists() and (folder / "config.yaml").exists()
        run = Run(self._config, resume=str(folder) if is_begun else None)
        outcome = Outcome(num_eval_tasks=0, engine_threads=1)
        async with run:
            try:
                await self._learn(run)
                outcome.status = RunStatus.COMPLETED
            except asyncio.CancelledError:
                if not self._is_interrupted or self._main_task is None:
                    raise
                self._main_task.uncancel()
                outcome.status = RunStatus.INTERRUPTED
            await run_loop.wind_up(run, outcome)
        return outcome.status

    async def _learn(self, run: Run) -> None:
        assert self._storm is not None
        last_step = math.inf
        while run.step < last_step:
            if self._storm.done():
                last_step = min(last_step, run.step + CALM_STEPS)
            batch = await run.prepare_batch()
            self._check_capacity(run.source, batch.step)
            self._check_servers(run.source)
            await run.train_step(batch)
            await run.push()
            self.num_steps = run.step
            if run_loop.is_evaluation_due(run):
                run.evaluate_beside()
            if run.step % CHECKPOINT_EVERY == 0:
                await run.save()

    def _check_servers(self, source: Source) -> None:
        """Hold the servers that are asked against those that are kept: they differ for `MOVED_S` at most."""
        assert isinstance(source, OwnRollouts)
        engine = source.serving.engine
        assert engine.servers is not None
        differing = set(engine.urls) ^ set(engine.servers.urls)
        self._differing_s = {url: self._differing_s.get(url, self.now_s) for url in differing}
        for url, since_s in self._differing_s.items():
            if self.now_s - since_s >= MOVED_S:
                self.truth.faults.append(f"{url} is asked and not kept, or kept and not asked, for {MOVED_S:g} s")

    def _check_capacity(self, source: Source, step: int) -> None:
        """Hold the counts of the staleness bound against the groups that are there, once a batch was taken."""
        assert isinstance(source, OwnRollouts)
        producer, size = source.producer, self._config.group_size
        counts = producer.admission
        counted = (counts.running, counts.finished, counts.consumed)
        there = (len(producer.running) * size, len(producer.ready) * size, step * self._config.batch_answers)
        if counted != there:
            self.truth.faults.append(f"step {step}: counted as running, finished, consumed: {counted}; there: {there}")

    # ----------------------------------------------------------------------------------------------- faults

    async def _strike_all(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            await asyncio.sleep(fault.gap_s)
            KINDS[fault.kind](self, fault)
        await asyncio.sleep(CALM_S)
        self._death = None

    def felt(self, fault: Fault, how: str) -> None:
        self.struck[fault.kind] += 1
        self._say(": ".join(filter(None, (fault.kind, how.strip()))))

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def set_the_clock(self, seconds: float) -> None:
        self._clock.offset_s += seconds

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self._loop.call_later(seconds, action)

    def processes(self, prefix: str) -> Sequence[SimulatedProcess]:
        found = [one for one in self._hosts.started if one.is_running and one.name.startswith(prefix)]
        return sorted(found, key=lambda one: one.name)

    def engines(self) -> Sequence[StormEngine]:
        return [engine for _, engine in sorted(self.network.engines.items()) if not engine.program.is_dead]

    def interrupt_run(self) -> bool:
        task, is_over = self._main_task, self._life_over.done()
        is_there = task is not None and not is_over and not self._is_interrupted and task.cancel()
        self._is_interrupted |= is_there
        return is_there

    def stop_run(self, for_s: float) -> bool:
        if is_there := not self._life_over.done():
            self._main.stop()
            self.after(for_s, self._main.go_on)
        return is_there

    def kill_at(self, point: str, times: int, felt: Callable[[], object]) -> None:
        self._death = (point, times, felt)

    def kill_run(self) -> bool:
        if is_there := not self._life_over.done():
            self._main.kill()
            self.cluster.end_job()
            self._life_over.set_result("it was killed")
        return is_there

    def _say(self, what: str) -> None:
        self.lines.append(f"{self.now_s:9.2f} s  {what.replace(str(self._folder), '.')}")

    def _dies_here(self, point: str) -> bool:
        """Count that a point is passed; return whether the run has just been killed there."""
        if self._death is None or self._death[0] != point:
            return False
        _, times, felt = self._death
        self._death = (point, times - 1, felt) if times else None
        if times == 0:
            felt()
            self.kill_run()
        return times == 0

    def _pass(self, point: CommitPoint) -> None:
        if self._dies_here(point):
            raise Stopped

    def _look(self, connection: sqlite3.Connection, point: str) -> None:
        if point == BEFORE_A_COMMIT:
            (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {num_pages if self.now_s < self.full_until_s else 2**30}")
        self._dies_here(point)

    def _disk_delay_s(self) -> float:
        return random.uniform(0.1, 5.0) if self.now_s < self.slow_until_s else 0.0

    def _try_the_disk(self) -> None:
        if self.now_s < self.no_saves_until_s:
            raise OSError(errno.ENOSPC, "No space left on device")


def _id_of(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))
