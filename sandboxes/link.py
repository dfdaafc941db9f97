"""The host's end of one launcher process: it sends requests and hands out the reports that come back.

All of it runs on the event loop; no thread waits for a program. `ChildProcess` and `ForkedProcess` are the launcher's
process as the host watches and kills it: started by the host, or forked by a zygote.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.inner.wire import MAX_DESCRIPTORS, REPORT, REQUEST, ReportKind, RequestKind

START_TIMEOUT_S = 30.0
MAX_ON_THE_WAY = 32
"""Programs that are sent but not started: as many as fit the socket and the kernel's bound on descriptors in flight."""
STOP_TIMEOUT_S = 10.0
RECEIVE_BYTES = 65_536
NO_ROOM = "the jail was given up because this process has too many open files; raise the limit (ulimit -n)"
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The kernel's account of a program that has ended: its wait status and the resources that it used."""

    wait_status: int
    cpu_s: float
    peak_memory_bytes: int


class LauncherProcess(Protocol):
    """The launcher's process, as a link watches and kills it."""

    shares_pids: bool
    """Whether a process has the same id for the launcher as for the host."""

    async def wait(self) -> None:
        """Wait until the process has ended."""
        ...

    def kill(self) -> None:
        """Kill the process. Harmless when it has ended."""
        ...


class ChildProcess:
    """A child of this process."""

    shares_pids = True

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        if not self.has_ended:
            self._process.kill()


class ForkedProcess:
    """A process that a zygote forked, known by the pidfd that it sends when it is ready (pidfd_open(2), Linux 5.3)."""

    shares_pids = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(descriptor, self._on_end)

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _on_end(self) -> None:
        assert self._descriptor is not None
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None
        self._ended.set_result(None)


def control_sockets(kind: int) -> tuple[socket.socket, socket.socket]:
    """Return the host's socket and the other for a launcher or zygote; SandboxError if too many files are open."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise SandboxError(f"the sandbox launcher could not be started: {error}") from error
    ours.setblocking(False)
    return ours, theirs


async def start_process(command: Callable[[int], Sequence[str]], kind: int) -> tuple[ChildProcess, socket.socket]:
    """Start a process of `inner/`, and return it with the host's end of its control socket.

    `command` makes the command line from the descriptor of the other end. Raises SandboxError.
    """
    ours, theirs = control_sockets(kind)
    try:
        process = await asyncio.create_subprocess_exec(
            *command(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,  # stderr stays ours: a traceback of the launcher is a bug, to be seen
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )  # fmt: skip
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox launcher could not be started: {error}") from error
        raise
    finally:
        theirs.close()
    return ChildProcess(process), ours


class Turn:
    """The right to have one program in flight to the launcher."""

    def __init__(self, room: asyncio.Semaphore) -> None:
        self._room: asyncio.Semaphore | None = room

    def end(self) -> None:
        """Give the turn back. Harmless when it has ended."""
        if self._room is not None:
            self._room.release()
            self._room = None


class Run:
    """One program in the launcher. `ended` raises SandboxError when the launcher could not run it to its end."""

    def __init__(self, run_id: int, ended: asyncio.Future[Ended], turn: Turn) -> None:
        self.id = run_id
        self.ended = ended
        self.turn = turn
        self.pid: int | None = None  # until it has started
        self.started_s = 0.0  # by the loop's clock


class LauncherTimeoutError(SandboxError):
    """A launcher did not report in time that it is ready."""


class LauncherLink:
    """The connection to one launcher. Make it with `start` or `follow`, end it with `aclose`.

    A launcher that has died stays dead: make another link.
    """

    def __init__(self, control: socket.socket, process: LauncherProcess | None) -> None:
        self.landlock_version = 0
        self.folder: int | None = None  # the working folder of a jail, open until `aclose`
        self._listener: socket.socket | None = None  # of a jail: its programs' way to the network, if they have one
        self._loop = asyncio.get_running_loop()
        self._process = process  # of a jail: None until its first report
        self._control = control
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._runs: dict[int, Run] = {}
        self._room = asyncio.Semaphore(MAX_ON_THE_WAY)
        self._unwritten = bytearray()
        self._next_id = 1
        self._received = b""
        self._is_alive = True
        self._loop.add_reader(control, self._on_readable)
        self._watch = None if process is None else self._loop.create_task(self._watch_process(process))

    @classmethod
    async def start(cls, command: Callable[[int], Sequence[str]]) -> Self:
        """Start a launcher with the command for its control descriptor; SandboxError when it cannot be started."""
        process, control = await start_process(command, socket.SOCK_STREAM)
        return await cls(control, process)._ready()

    @classmethod
    async def follow(cls, control: socket.socket) -> Self:
        """Connect to a launcher that another process starts; `control` is the host's end, which the link takes over."""
        return await cls(control, None)._ready()

    async def _ready(self) -> Self:
        try:
            await asyncio.wait_for(self._hello, START_TIMEOUT_S)
        except BaseException as error:
            await self.aclose()
            if isinstance(error, TimeoutError):
                raise LauncherTimeoutError(f"the sandbox launcher did not start within {START_TIMEOUT_S:g} s") from None
            raise
        return self

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    def take_listener(self) -> socket.socket | None:
        """Return the socket on which a jail's programs ask for the network; the caller owns it from now on."""
        listener, self._listener = self._listener, None
        return listener

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[Turn, None]:
        """Wait for a turn. Take it before opening a program's descriptors, so that any number of programs may wait."""
        await self._room.acquire()
        turn = Turn(self._room)
        try:
            yield turn
        finally:
            turn.end()

    def run(self, descriptors: Sequence[int], turn: Turn) -> Run:
        """Start a program, given its descriptors (request, stdin, stdout, stderr), which the caller still owns."""
        run = Run(self._next_id, self._loop.create_future(), turn)
        self._next_id += 1
        self._write_kills()  # requests are taken in order: what was killed before is dead before this starts
        if not self._is_alive:
            raise SandboxError("the sandbox launcher is not running")
        try:
            socket.send_fds(self._control, [REQUEST.pack(RequestKind.START, run.id)], descriptors)
        except ConnectionError:  # it has died, and the loop has not read that yet
            self._fail("the sandbox launcher died")
            raise SandboxError("the sandbox launcher died before it could run a program") from None
        except OSError as error:
            raise SandboxError(f"the sandbox launcher did not accept a request: {error}") from error
        self._runs[run.id] = run
        return run

    def kill(self, run: Run) -> None:
        """Kill a program and its process group. Harmless when it has ended."""
        if run.id in self._runs:
            if not self._unwritten:
                self._loop.call_soon(self._write_kills)  # batch the kills of one moment: they then take little room
            self._unwritten += REQUEST.pack(RequestKind.KILL, run.id)

    def abandon(self) -> None:
        """Kill a launcher that no longer answers; all its runs fail."""
        if self._process is not None:
            self._process.kill()
        self._fail("the sandbox launcher did not answer and was killed")

    async def aclose(self) -> None:
        """End the launcher and all of its programs."""
        self._fail("the sandbox launcher was closed")
        if self._process is not None and self._watch is not None:
            done, _ = await asyncio.wait([self._watch], timeout=STOP_TIMEOUT_S)
            if not done:
                self._process.kill()
                await self._watch
        if (listener := self.take_listener()) is not None:
            listener.close()
        if self.folder is not None:
            folder, self.folder = self.folder, None
            os.close(folder)

    async def _watch_process(self, process: LauncherProcess) -> None:
        await process.wait()
        self._fail("the sandbox launcher died")

    def _write_kills(self) -> None:
        if not self._is_alive or not self._unwritten:
            return
        self._loop.remove_writer(self._control)
        try:
            del self._unwritten[: self._control.send(self._unwritten)]
        except BlockingIOError:
            pass
        except OSError:  # the launcher is dead, and its programs with it
            self._fail("the sandbox launcher died")
            return
        if self._unwritten:
            self._loop.add_writer(self._control, self._write_kills)

    def _on_readable(self) -> None:
        try:
            data = self._control.recv(RECEIVE_BYTES) if self._hello.done() else self._receive_with_descriptors()
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._fail("the sandbox launcher died")
            return
        data = self._received + data
        num_whole = len(data) // REPORT.size * REPORT.size
        self._received = data[num_whole:]
        for kind, run_id, value, cpu_us, peak_bytes in REPORT.iter_unpack(data[:num_whole]):
            self._on_report(kind, run_id, value, cpu_us, peak_bytes)

    def _receive_with_descriptors(self) -> bytes:
        """Receive a jail's first report, which carries its descriptors."""
        data, descriptors, flags, _ = socket.recv_fds(self._control, RECEIVE_BYTES, MAX_DESCRIPTORS)
        if flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            settle(self._hello, SandboxError(NO_ROOM))
        elif descriptors:
            self.folder, process, *listeners = descriptors
            self._process = ForkedProcess(process)
            self._watch = self._loop.create_task(self._watch_process(self._process))
            self._listener = socket.socket(fileno=listeners[0]) if listeners else None
        return data

    def _on_report(self, kind: int, run_id: int, value: int, cpu_us: int, peak_bytes: int) -> None:
        run = self._runs.get(run_id)
        if kind == ReportKind.HELLO:
            self.landlock_version = value
            settle(self._hello, None)
        elif kind == ReportKind.FAILED and run_id == 0:
            settle(self._hello, SandboxError(f"the jail could not be built: {os.strerror(value)}"))
        elif run is None:
            return  # it failed already: we learned of its child's death before the launcher did
        elif kind == ReportKind.STARTED:
            run.pid = value
            run.started_s = self._loop.time()
            run.turn.end()
        else:
            run.turn.end()
            del self._runs[run_id]
            if kind == ReportKind.ENDED:
                ended = Ended(wait_status=value, cpu_s=cpu_us / 1e6, peak_memory_bytes=peak_bytes)
                settle(run.ended, ended)
            else:
                reason = os.strerror(value) if value else "not a system error"
                settle(run.ended, SandboxError(f"the program could not be set up: {reason}"))

    def _fail(self, reason: str) -> None:
        """Give the launcher up: fail everything that waits for it and release it."""
        if not self._is_alive:
            return
        self._is_alive = False
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            run.turn.end()
            if self._process is not None and self._process.shares_pids:
                _kill_orphans(run)
            settle(run.ended, SandboxError(f"{reason} while a program ran"))
        settle(self._hello, SandboxError(f"{reason} before it was ready"))


def settle(future: asyncio.Future[Outcome], outcome: Outcome | SandboxError) -> None:
    """Give a future its outcome, unless its waiter has gone."""
    if future.done():
        return
    if isinstance(outcome, SandboxError):
        future.set_exception(outcome)
        future.exception()  # mark it as retrieved: a cancelled waiter does not ask for it
    else:
        future.set_result(outcome)


def _kill_orphans(run: Run) -> None:
    """Kill the group of a program whose launcher died; the kernel killed only its leader (PR_SET_PDEATHSIG)."""
    if run.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(run.pid, signal.SIGKILL)
