"""Simulated machines in one process: an event loop with a clock of its own, and programs that it can kill or stop.

    loop: nothing is ready ─▶ the clock jumps to the next timer      (what sockets have to say comes first)
    program: a context variable; tasks and callbacks inherit it
        kill ─▶ nothing of it runs any more, not even a `finally`; its sockets are closed, its locks are free
        stop ─▶ what becomes ready waits until it goes on

Work that the product gives to threads is done at once, so that one seed gives one story. The process belongs to the
storm: its clocks are the loop's, and a ledger commits in the event loop. Sockets and SQLite's files are real.
"""

import asyncio
import contextlib
import contextvars
import itertools
import logging
import math
import os
import random
import selectors
import socket
import sqlite3
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from areal_agent.callback import KEY_VARIABLE, LOOPBACK, call_back
from areal_agent.engine.address import Backend
from areal_agent.errors import ProcessDied
from areal_agent.ledger import files, shard
from areal_agent.storm import CLOCKS

logger = logging.getLogger(__name__)

BEGINNING_S = 1_700_000_000.0
"""The wall clock when a story begins, in seconds since 1970."""


BEFORE_A_COMMIT, AFTER_A_COMMIT = "before a commit", "after a commit"
"""The points of the ledger at which a program may be killed."""


class Deadlock(Exception):
    """Nothing is ready, and no timer is set."""


_dead: list[asyncio.Task[Any]] = []
"""Tasks, which are kept for ever: those that are collected run their `finally`, and the dead run nothing."""


class Node:
    """A machine of a cluster."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._silent_until_s = 0.0  # by the loop's clock
        self._programs: list[Program] = []

    @property
    def programs(self) -> "Sequence[Program]":
        """The living ones."""
        self._programs = [one for one in self._programs if not one.is_dead]
        return self._programs

    def add(self, program: "Program") -> None:
        self._programs.append(program)

    def silence(self, for_s: float) -> None:
        """Let nothing get to it or from it for a while."""
        self._silent_until_s = max(self._silent_until_s, asyncio.get_running_loop().time() + for_s)

    def is_silent(self) -> bool:
        return self._silent_until_s > asyncio.get_running_loop().time()


class Program:
    """What runs between a start and an end. Everything that it opens is closed when it is killed, as a kernel would."""

    def __init__(self, name: str, node: Node | None = None) -> None:
        """`node` is None for the machine of the run's own process."""
        self.name = name
        self.node = node
        if node is not None:
            node.add(self)
        self.is_dead = False
        self._num_stops = 0
        self.held: list[events.Handle] = []  # what became ready while it was stopped
        self.owned: list[Callable[[], object]] = []  # each closes something

    def kill(self) -> None:
        """End it between two callbacks, like SIGKILL."""
        self.is_dead = True
        _dead.extend(asyncio.all_tasks())
        for close in reversed(self.owned):
            with contextlib.suppress(OSError, ValueError, sqlite3.Error):
                close()

    @property
    def is_stopped(self) -> bool:
        return self._num_stops > 0

    def stop(self) -> None:
        """Stop it, as SIGSTOP does, and a machine that stands still."""
        self._num_stops += 1

    def go_on(self) -> None:
        """Continue, unless it was stopped once more."""
        self._num_stops -= 1
        if self.is_stopped:
            return
        held, self.held = self.held, []
        for handle in held:
            asyncio.get_running_loop().call_soon(_run_unless_cancelled, handle)


PROGRAM: contextvars.ContextVar[Program] = contextvars.ContextVar("program")


def are_apart(one: Program, other: Program) -> bool:
    """Return whether nothing gets from one program to the other now, as a node is cut off."""
    return one.node is not other.node and any(node is not None and node.is_silent() for node in (one.node, other.node))


def owned(close: Callable[[], object]) -> None:
    """Have `close` called when the program that runs now is killed."""
    if (program := PROGRAM.get(None)) is not None:
        program.owned.append(close)


SETTLING_S = 0.0002
"""The real time in which the kernel brings what was sent over loopback."""


class _Timers(selectors.DefaultSelector):
    """Looks at the sockets; when they are silent, the clock jumps instead of waiting."""

    now_s = 0.0
    has_talked = False  # something was written to a socket, or read, since the clock jumped

    def __init__(self, peer_of: Callable[[int], Program | None]) -> None:
        """`peer_of` says which program is at the other end of a socket."""
        super().__init__()
        self.peer_of = peer_of

    def _heard(self) -> Any:
        """Return what sockets have to say to programs that run."""
        return [
            (key, mask)
            for key, mask in super().select(0)
            if not any(handle is not None and _is_held(handle, self.peer_of(key.fd)) for handle in key.data)
        ]

    def select(self, timeout: float | None = None) -> Any:
        ready = self._heard()
        if not ready and self.has_talked:  # the kernel may still be carrying it
            time.sleep(SETTLING_S)  # epoll knows whole milliseconds alone
            ready, self.has_talked = self._heard(), False
        if ready:
            self.has_talked = True
            return ready
        if timeout is None:
            raise Deadlock
        self.now_s += max(0.0, timeout)
        return ready


_numbers = itertools.count()


class _Numbered:
    """Has a number for a hash, so that sets of tasks and futures have the same order each time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task[Any]):
    pass


class _Future(_Numbered, asyncio.Future[Any]):
    pass


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> _Task:
    return _Task(coroutine, loop=loop, **given)


_owners: dict[Any, Program] = {}
"""Whose a socket is, by its address."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, in which threads are calls."""

    def __init__(self) -> None:
        self._timers = _Timers(self._peer)
        super().__init__(self._timers)
        self.slow_callback_duration = math.inf
        self.set_task_factory(_task)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def time(self) -> float:
        return self._timers.now_s

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """Do nothing: signals are the storm's own."""

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call it now; the caller hears of it in the loop's next turn, as from a thread."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _make_socket_transport(self, sock: socket.socket, *args: Any, **kwargs: Any) -> Any:
        transport: Any = super()._make_socket_transport(sock, *args, **kwargs)  # type: ignore[misc]
        if (program := PROGRAM.get(None)) is not None:
            _owners[sock.getsockname()] = program
        write = transport.write

        def hang_up() -> None:
            self._hang_up(sock)
            transport._closing, transport._conn_lost = True, 1  # else it closes, when collected, what has its number

        owned(hang_up)

        def write_and_tell(data: bytes) -> None:
            self._timers.has_talked = True
            write(data)

        transport.write = write_and_tell
        return transport

    def _start_serving(self, protocol_factory: Any, sock: socket.socket, *args: Any, **kwargs: Any) -> Any:
        owned(lambda: self._hang_up(sock))
        return super()._start_serving(protocol_factory, sock, *args, **kwargs)  # type: ignore[misc]

    def _peer(self, fd: int) -> Program | None:
        transport = self._transports.get(fd)  # type: ignore[attr-defined]
        if transport is None or transport.is_closing():  # then another socket may have its number
            return None
        return _owners.get(transport.get_extra_info("peername"))

    def _hang_up(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._remove_reader(sock.fileno())  # type: ignore[attr-defined]
            self._remove_writer(sock.fileno())  # type: ignore[attr-defined]
            self._transports.pop(sock.fileno(), None)  # type: ignore[attr-defined]
            sock.close()


_run_handle = events.Handle._run  # pyright: ignore[reportPrivateUsage]


def _is_held(handle: events.Handle, peer: Program | None) -> bool:
    """Return whether a callback is of a program that does not run now, or hears nothing from the other end."""
    program: Program | None = handle._context.get(PROGRAM)  # type: ignore[attr-defined]
    if program is None:
        return False
    return program.is_dead or program.is_stopped or (peer is not None and are_apart(program, peer))


def _run_unless_cancelled(handle: events.Handle) -> None:
    if not handle.cancelled():
        _run_unless_dead(handle)


def _run_unless_dead(handle: events.Handle) -> None:
    """Run a callback of the loop, unless its program is dead or stopped."""
    program: Program | None = handle._context.get(PROGRAM)  # type: ignore[attr-defined]
    if program is None or not (program.is_dead or program.is_stopped):
        _run_handle(handle)
    elif not program.is_dead:
        program.held.append(handle)


class WriterAtOnce(shard.GroupCommitWriter):
    """Commits a group in the event loop, at once or `delay_s` later.

    `look` is called before and after each commit, and may kill the program.
    """

    @staticmethod
    def look(connection: sqlite3.Connection, point: str) -> None: ...

    @staticmethod
    def delay_s() -> float:
        return 0.0

    def _begin(self) -> None:
        self._groups: list[Sequence[shard.Request]] = []  # on their way to the disk
        owned(self._connection.close)

    def _hand_over(self, group: Sequence[shard.Request] | None) -> None:
        if group is None:
            return
        self._groups.append(group)
        if seconds := WriterAtOnce.delay_s():
            self._loop.call_later(seconds, self._write)
        else:
            self._write()

    def _write(self) -> None:
        if not self._groups:  # closed meanwhile
            return
        WriterAtOnce.look(self._connection, BEFORE_A_COMMIT)
        if PROGRAM.get().is_dead:
            return
        group = self._groups.pop(0)
        self._commit(group)
        WriterAtOnce.look(self._connection, AFTER_A_COMMIT)
        self._loop.call_soon(self._deliver, group)

    def _finish(self) -> None:
        while self._groups and not PROGRAM.get().is_dead:
            self._write()


class WallClock:
    """The time of day, which may be set."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.offset_s = BEGINNING_S

    def now(self) -> float:
        return self.offset_s + self._loop.time()


_take_lock = files.FileLock.take


def _take_and_own(path: Path, *, is_shard: bool) -> files.FileLock:
    lock = _take_lock(path, is_shard=is_shard)
    owned(lock.release)
    return lock


@contextmanager
def simulated(seed: int) -> Generator[tuple[SimulatedLoop, WallClock]]:
    """Inside, this process has a simulated clock, no threads, and names that depend on the seed alone."""
    loop = SimulatedLoop()
    clock, drawn = WallClock(loop), random.Random(seed)
    with ExitStack() as stack:
        clocks = {"monotonic": loop.time, "perf_counter": loop.time, "time": clock.now}
        stack.enter_context(mock.patch.dict(CLOCKS, clocks))
        for where, name, value in (
            (os, "urandom", drawn.randbytes),
            (random, "_urandom", drawn.randbytes),  # of `secrets`
            (events.Handle, "_run", _run_unless_dead),
            (shard, "GroupCommitWriter", WriterAtOnce),
            (files.FileLock, "take", staticmethod(_take_and_own)),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.callback(loop.close)
        yield loop, clock


# ---------------------------------------------------------------------------------------------------- processes


Main = Callable[[Sequence[str], socket.socket], Coroutine[Any, Any, None]]
"""What a simulated process does with its command line and the socket over which it has called its parent back."""


class SimulatedProcess:
    """A `hosts.Process`: a program in this loop, which ends with the one that started it."""

    pid = None

    def __init__(self, name: str, log_path: Path, main: Main, argv: Sequence[str], key: str) -> None:
        self.name = name
        self.log_path = log_path
        log_path.touch()
        parent = PROGRAM.get()
        self.program = Program(name, parent.node)
        self.program.owned.append(lambda: self._over(-9))
        parent.owned.append(self.program.kill)
        self.exit_status: int | None = None
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        os.environ[KEY_VARIABLE] = key
        sock = call_back(argv[argv.index("--connect") + 1])
        _owners[sock.getsockname()] = self.program
        context = contextvars.copy_context()
        context.run(PROGRAM.set, self.program)
        context.run(owned, sock.close)
        self._task = asyncio.get_running_loop().create_task(self._run(main(argv, sock)), name=name, context=context)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        status = 1
        try:
            await work
            status = 0
        except Exception:
            logger.exception("the %s failed", self.name)
            raise
        finally:
            self._over(status)

    def _over(self, status: int) -> None:
        self.exit_status = status if self.exit_status is None else self.exit_status
        if not self._end.done():
            self._end.set_result(status)

    @property
    def is_running(self) -> bool:
        return self.exit_status is None

    async def died(self) -> ProcessDied:
        status = await asyncio.shield(self._end)
        return ProcessDied(f"the {self.name} has ended with status {status}; {self.log_tail()}")

    def log_tail(self, num_lines: int = 12) -> str:
        return "it is simulated and has no log"

    def kill(self) -> None:
        self.program.kill()

    async def aclose(self, grace_s: float = 5.0, *, with_session: bool = False) -> None:
        """End it: it is cancelled, then killed after `grace_s`, or at once if this is cancelled."""
        try:
            if self.is_running:
                self._task.cancel()
                await asyncio.wait({asyncio.ensure_future(asyncio.shield(self._end))}, timeout=grace_s)
        finally:
            self.kill()


class SimulatedHosts:
    """The `hosts.Hosts` of a story, and each `hosts.Host`. `programs` are the main functions by the module started."""

    home = address = LOOPBACK
    chooses_gpus = False

    def __init__(self, programs: Mapping[str, Main]) -> None:
        self._programs = programs
        self.started: list[SimulatedProcess] = []

    def engine_key(self, backend: Backend) -> None:
        return None

    async def host_for(self, name: str) -> "SimulatedHosts":
        return self

    async def free_port(self) -> int:
        return 0

    async def start(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
    ) -> SimulatedProcess:
        main = self._programs[argv[argv.index("-m") + 1]]
        process = SimulatedProcess(name, log_path, main, argv, (env or {})[KEY_VARIABLE])
        self.started.append(process)
        return process
