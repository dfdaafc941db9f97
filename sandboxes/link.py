"""The host's end of one launcher process: it sends requests and hands out the reports that come back.

All of it runs on the event loop; no thread waits for a program. The launcher is a child of this process, or the
`ForkedProcess` of a zygote.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.inner.wire import MAX_DESCRIPTORS, REPORT, REQUEST, ReportKind, RequestKind

START_TIMEOUT_S = 30.0
MAX_ON_THE_WAY = 32
"""Programs that are sent but not started: as many as fit the socket and the kernel's bound on descriptors in flight."""
STOP_TIMEOUT_S = 10.0
RECEIVE_BYTES = 65_536
INNER = Path(__file__).with_name("inner")
BOOT = (
    "import sys, types; package = sys.modules['sandboxes'] = types.ModuleType('sandboxes'); "
    "package.__path__ = []; inner = sys.modules['sandboxes.inner'] = types.ModuleType('sandboxes.inner'); "
    "inner.__path__ = [sys.argv.pop(1)]; from sandboxes.inner.{module} import main; main()"
)
"""Runs one module of `inner/` without the package's `__init__`, whose imports are useless there."""
NO_ROOM = "the jail was given up because this process has too many open files; raise the limit (ulimit -n)"
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The kernel's account of a program that has ended: its wait status and the resources that it used."""

    wait_status: int
    cpu_s: float
    peak_memory_bytes: int


class ForkedProcess:
    """A process that a zygote forked, known by the pidfd that it sends when it is ready (pidfd_open(2), Linux 5.3)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(descriptor, self._on_end)

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Kill the process; ProcessLookupError when it has ended, as for a child."""
        if self._descriptor is None:
            raise ProcessLookupError
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


async def start_process(module: str, kind: int, setting: str) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a module of `inner/` with its setting; return it and the host's end of its control socket.

    The Python that it starts sees nothing of this package but `inner/`. Raises SandboxError.
    """
    ours, theirs = control_sockets(kind)
    python = (interpreter(), "-I", "-S", "-X", "utf8", "-c", BOOT.format(module=module), str(INNER))
    try:
        process = await asyncio.create_subprocess_exec(
            *python,
            str(theirs.fileno()),
            setting,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,  # stderr stays ours: a traceback of the launcher is a bug, to be seen
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox launcher could not be started: {error}") from error
        raise
    finally:
        theirs.close()
    return process, ours


def interpreter() -> str:
    """Return the real interpreter behind any virtual environment, which a jail does not show."""
    return os.path.realpath(sys.executable)


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """One program in the launcher. `ended` raises SandboxError when the launcher could not run it to its end."""

    id: int
    ended: asyncio.Future[Ended]
    turn: ExitStack  # is closed when the program has started
    started_s: float  # by the loop's clock; until it has started, when it was sent
    pid: int | None = None  # None until it has started


class LauncherTimeoutError(SandboxError):
    """A launcher did not report in time that it is ready."""


class LauncherLink:
    """The connection to one launcher. Make it with `start` or `follow`, end it with `aclose`.

    A launcher that has died stays dead: make another link.
    """

    def __init__(self, control: socket.socket, process: asyncio.subprocess.Process | None) -> None:
        self.is_alive = True
        self.landlock_version = 0
        self.folder: int | None = None  # the working folder of a jail, open until `aclose`
        self._listener: socket.socket | None = None  # of a jail: its programs' way to the network, if they have one
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | ForkedProcess | None = process  # of a jail: None until it reports
        self._shares_pids = process is not None  # whether a program has the same id for the launcher as for the host
        self._control = control
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._runs: dict[int, Run] = {}
        self._room = asyncio.Semaphore(MAX_ON_THE_WAY)
        self._unwritten = bytearray()
        self._next_id = 1
        self._received = b""
        self._loop.add_reader(control, self._on_readable)
        self._watch = None if process is None else self._loop.create_task(self._watch_process(process))

    @classmethod
    async def start(cls, root: Path) -> Self:
        """Start a launcher that removes the folder `root` at its end; SandboxError when it cannot be started."""
        process, control = await start_process("launcher", socket.SOCK_STREAM, str(root))
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

    def take_listener(self) -> socket.socket | None:
        """Return the socket on which a jail's programs ask for the network; the caller owns it from now on."""
        listener, self._listener = self._listener, None
        return listener

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[ExitStack, None]:
        """Wait for a turn to have one program in flight to the launcher; closing the stack ends the turn.

        Take it before opening a program's descriptors, so that any number of programs may wait.
        """
        await self._room.acquire()
        with ExitStack() as turn:
            turn.callback(self._room.release)
            yield turn

    def run(self, descriptors: Sequence[int], turn: ExitStack) -> Run:
        """Start a program, given its descriptors (request, stdin, stdout, stderr), which the caller still owns."""
        run = Run(id=self._next_id, ended=self._loop.create_future(), turn=turn, started_s=self._loop.time())
        self._next_id += 1
        self._write_kills()  # requests are taken in order: what was killed before is dead before this starts
        if not self.is_alive:
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
        self._kill_process()
        self._fail("the sandbox launcher did not answer and was killed")

    async def aclose(self) -> None:
        """End the launcher and all of its programs."""
        self._fail("the sandbox launcher was closed")
        if self._watch is not None:
            done, _ = await asyncio.wait([self._watch], timeout=STOP_TIMEOUT_S)
            if not done:
                self._kill_process()
                await self._watch
        if (listener := self.take_listener()) is not None:
            listener.close()
        if self.folder is not None:
            folder, self.folder = self.folder, None
            os.close(folder)

    async def _watch_process(self, process: asyncio.subprocess.Process | ForkedProcess) -> None:
        await process.wait()
        self._fail("the sandbox launcher died")

    def _kill_process(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._process.kill()

    def _write_kills(self) -> None:
        if not self.is_alive or not self._unwritten:
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
            run.turn.close()
        else:
            run.turn.close()
            del self._runs[run_id]
            if kind == ReportKind.ENDED:
                ended = Ended(wait_status=value, cpu_s=cpu_us / 1e6, peak_memory_bytes=peak_bytes)
                settle(run.ended, ended)
            else:
                reason = os.strerror(value) if value else "not a system error"
                settle(run.ended, SandboxError(f"the program could not be set up: {reason}"))

    def _fail(self, reason: str) -> None:
        """Give the launcher up: fail everything that waits for it and release it."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            run.turn.close()
            if self._shares_pids and run.pid is not None:
                # The group of a program whose launcher died: the kernel killed only its leader (PR_SET_PDEATHSIG).
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(run.pid, signal.SIGKILL)
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
