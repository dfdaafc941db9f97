"""The host's end of an agent: it starts runs, feeds them, and hands out what comes of each; and how an agent is sent.

What comes out of a sandbox is not trusted: a malformed frame, or more output than was allowed, ends the sandbox.

The agent gets into a container through a command line (`COMMAND`) that reads modules from its standard input
(`boot_data`). So an image needs nothing of ours, and a container always has its host's agent. On the host
itself `start_process` starts one of its modules.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.agent.forker import children_of
from sandboxes.agent.wire import ENDED, HEADER, MAX_PAYLOAD_BYTES, START, Ask, End, Tell, pack, whole_frames

READY_TIMEOUT_S = 60.0
MAX_ON_THE_WAY = 32
"""The most programs that are sent but not started: an agent holds several descriptors for each."""
DEADLINE_GRACE_S = 0.5
"""The agent keeps the deadline; the host has the program killed this much later, in case the agent does not."""
SILENCE_S = 30.0
"""An agent that owes the start or end of a program, and sends nothing at all for this long, is given up. It is long
because an agent among many programs on few CPUs is slow, not dead."""
MAX_SILENCES = 4
"""An agent that sends only other things is given up after this many times `SILENCE_S`."""
END_PATIENCE_S = 5.0
"""An agent ends with its stream, within milliseconds; otherwise it has to be killed."""
CHUNK_BYTES = 65_536
MAX_DIAGNOSIS_BYTES = 4096
GONE = "the sandbox is gone, and its files with it; acquire another"
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program, as the kernel and its agent account for it; in the order of `wire.ENDED`."""

    wait_status: int
    wall_s: float = 0.0  # as the agent measured it: the host hears of a start late
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    oom_kills: int = 0  # processes of its sandbox that were killed because memory ran out
    refused_forks: int = 0
    reason: End = End.ITSELF
    is_cut: bool = False  # whether it printed more than it may

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read what an agent tells; ValueError or struct.error for what no agent would."""
        status, wall_us, cpu_us, peak_bytes, oom_kills, refused_forks, reason, is_cut = ENDED.unpack(body)
        os.waitstatus_to_exitcode(status)  # ValueError for an invalid one
        wall_s, cpu_s = wall_us / 1e6, cpu_us / 1e6
        return cls(status, wall_s, cpu_s, peak_bytes, oom_kills, refused_forks, End(reason), is_cut)


OUT_OF_MEMORY = Ended(wait_status=signal.SIGKILL, oom_kills=1)
OUT_OF_DISK = Ended(wait_status=signal.SIGKILL, reason=End.DISK)
"""The end of every program in a sandbox that its programs brought to an end: they left no memory for the agent itself,
or wrote more than they may."""


class AgentRun:
    """One run, to be started by a link. `ended` raises SandboxError when the sandbox could not run it to its end.

    `wall_s` counts from the program's start; 0 is no deadline. `on_output` takes chunks of stdout and stderr; an empty
    one means that the program has closed it.
    """

    def __init__(self, wall_s: float, on_output: Callable[[Tell, bytes], None]) -> None:
        self.wall_s = wall_s
        self.on_output = on_output
        self.number = 0  # set at its start
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.taken: asyncio.Future[bool] | None = None  # whether stdin took what it was given
        self.is_killed = False
        self.has_started = False
        self._timer: asyncio.TimerHandle | None = None  # for the next step if nothing is heard of the run

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


async def never() -> bool:
    return False


class AgentLink:
    """The connection to one agent, over the stream of its sandbox. End it with `aclose`; the sandbox ends too.

    `chunks` yields what comes, each piece with whether it is a diagnosis rather than a part of frames. When the agent
    ends by itself, `has_run_out` tells whether the sandbox's memory had run out. `blamed` is the end of all programs,
    once they have ended their sandbox.
    """

    def __init__(
        self,
        chunks: AsyncIterator[tuple[bool, bytes]],
        writer: asyncio.StreamWriter,
        has_run_out: Callable[[], Awaitable[bool]] = never,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._writer = writer
        self._has_run_out = has_run_out
        self._silence_s = silence_s
        self.landlock_version = 0
        self.is_given_up = False  # its stream was closed from here, so it may still live
        self._loop = asyncio.get_running_loop()
        self.is_alive = True
        self.blamed: Ended | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._pong: asyncio.Future[None] | None = None
        self._runs: dict[int, AgentRun] = {}
        self._next_number = 1
        self._room = asyncio.Semaphore(MAX_ON_THE_WAY)
        self._unsent = bytearray()
        self._received = bytearray()
        self._num_heard = 0
        self._reading = asyncio.create_task(self._read(chunks))

    async def boot(self, data: bytes = b"") -> Self:
        """Send the agent, and wait until it serves."""
        self._writer.write(data)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._ready
        except TimeoutError:
            self.fail("its start takes too long")
            raise SandboxError(f"the agent of a sandbox did not start within {READY_TIMEOUT_S:g} s") from None
        return self

    async def itself(self) -> Self:
        return self

    async def check_alive(self) -> None:
        """Raise SandboxError when the sandbox is gone; OSError when its programs brought that about."""
        if self.is_alive:
            return
        await asyncio.wait([self._reading])  # then it is known why
        if self.blamed is not None:
            what = "memory" if self.blamed.oom_kills else "disk"
            raise OSError(errno.ENOSPC, f"its programs used up all {what}: {GONE}")
        raise SandboxError(GONE)

    async def answers(self) -> bool:
        """Return whether the agent answers."""
        if not self.is_alive:
            return False
        pong = self._pong = self._pong or self._loop.create_future()
        self._send_frame(Ask.PING, 0)
        await asyncio.wait([pong, self._reading], timeout=END_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        return pong.done() and self.is_alive

    async def start(
        self, run: AgentRun, request: bytes, *, output_bytes: int, is_paced: bool, stdin: bytes | None = None
    ) -> None:
        """Start a run; waits while many are on their way.

        `request` is what `agent/program.py` reads; `output_bytes` of -1 is no bound. With `is_paced`, a chunk of output
        comes once `Ask.MORE` asked for it. `stdin` is at most `CHUNK_BYTES`; None: it comes by `feed` or `offer`.
        """
        await self._room.acquire()
        if not self.is_alive:
            self._room.release()
            with contextlib.suppress(OSError):
                await self.check_alive()
            settle(run.ended, self.blamed or SandboxError(GONE))
            return
        run.number = self._next_number
        self._next_number += 1
        self._runs[run.number] = run
        num_stdin = -1 if stdin is None else len(stdin)
        self.ask(Ask.START, run, START.pack(run.wall_s, output_bytes, is_paced, num_stdin) + (stdin or b"") + request)
        self._expect(run)

    async def feed(self, run: AgentRun, data: bytes) -> None:
        """Send all of stdin, then close it."""
        for at in range(0, len(data), CHUNK_BYTES):
            if at:
                await self._drain(run)
            self.ask(Ask.STDIN, run, data[at : at + CHUNK_BYTES])
        self.ask(Ask.CLOSE_STDIN, run)

    async def offer(self, run: AgentRun, data: bytes) -> bool:
        """Send some of stdin, one call at a time; return whether it was taken, rather than having lost its reader."""
        run.taken = asyncio.get_running_loop().create_future()
        self.ask(Ask.STDIN, run, data)
        await asyncio.wait([run.taken, run.ended], return_when=asyncio.FIRST_COMPLETED)
        return run.taken.done() and run.taken.result()

    def kill(self, run: AgentRun) -> None:
        """Kill a run; harmless when it has ended. The sandbox is given up if the run does not die."""
        if run.number in self._runs and not run.is_killed:
            run.is_killed = True
            self.ask(Ask.KILL, run)
            self._expect(run)

    async def aclose(self) -> None:
        """End the agent. On return all processes of the sandbox are dead, or `is_given_up` is set."""
        self._fail("it was closed")
        if not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()
        await asyncio.wait([self._reading], timeout=END_PATIENCE_S)
        self._give_up()

    def fail(self, reason: str) -> None:
        """Give the sandbox up."""
        self._fail(reason)
        self._give_up()

    def _give_up(self) -> None:
        if not self._reading.done():
            self.is_given_up = True
            self._reading.cancel()
        self._writer.transport.abort()

    async def _drain(self, run: AgentRun) -> None:
        self._send()
        if not run.ended.done():
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    def ask(self, kind: Ask, run: AgentRun, body: bytes = b"") -> None:
        """Send a frame about a run, unless the run has ended."""
        if run.number in self._runs:
            self._send_frame(kind, run.number, body)

    def _send_frame(self, kind: Ask, number: int, body: bytes = b"") -> None:
        if not self._unsent:
            self._loop.call_soon(self._send)  # batch what is sent in one moment
        self._unsent += HEADER.pack(kind, number, len(body)) + body

    def _send(self) -> None:
        if self._unsent and self.is_alive:
            self._writer.write(bytes(self._unsent))
        self._unsent.clear()

    # ── what is waited for ────────────────────────────────────────────────────────────────────────────────────────

    def _expect(self, run: AgentRun, num_silences: int = 0) -> None:
        """Expect the run's start or, once it is killed, its end."""
        run.set_timer(self._loop.call_later(self._silence_s, self._listen, run, self._num_heard, num_silences))

    def _listen(self, run: AgentRun, num_heard: int, num_silences: int) -> None:
        """Take what has come before judging the silence: this process itself may have been stopped for a while."""
        run.set_timer(self._loop.call_later(DEADLINE_GRACE_S, self._on_silence, run, num_heard, num_silences))

    def _on_silence(self, run: AgentRun, num_heard: int, num_silences: int) -> None:
        if self._num_heard != num_heard and num_silences + 1 < MAX_SILENCES:
            self._expect(run, num_silences + 1)
        else:
            verb = "end" if run.is_killed else "start"
            self.fail(f"its agent did not {verb} a program within {self._silence_s * (num_silences + 1):g} s")

    def _on_started(self, run: AgentRun) -> None:
        if run.has_started:
            return
        run.has_started = True
        self._room.release()
        if not run.is_killed:
            is_timed = bool(run.wall_s)
            run.set_timer(self._loop.call_later(run.wall_s + DEADLINE_GRACE_S, self.kill, run) if is_timed else None)

    def _settle(self, run: AgentRun, outcome: Ended | SandboxError) -> None:
        """Give a run, which was removed from `_runs`, its outcome, unless its waiter has gone."""
        run.set_timer(None)
        if not run.has_started:
            self._room.release()
        settle(run.ended, outcome)

    # ── what comes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, chunks: AsyncIterator[tuple[bool, bytes]]) -> None:
        diagnosis = b""
        async for is_error, data in chunks:
            if is_error:
                diagnosis = (diagnosis + data)[-MAX_DIAGNOSIS_BYTES:]
            else:
                self._on_data(data)
        self._writer.transport.abort()  # whoever waits to send more would wait for ever
        if self.is_alive:
            self.is_alive = False
            told = diagnosis.decode(errors="replace").strip()
            try:
                if self.blamed is None and await self._has_run_out():
                    self.blamed = OUT_OF_MEMORY
            finally:
                self._end(f"it ended by itself{': ' + told if told else ''}")

    def _on_data(self, data: bytes) -> None:
        self._received += data
        try:
            for kind, number, body in whole_frames(self._received, MAX_PAYLOAD_BYTES):
                self._on_frame(Tell(kind), number, body)
        except (ValueError, LookupError, struct.error) as error:
            self.fail(f"its agent is not the one that was sent there ({error})")

    def _on_frame(self, kind: Tell, number: int, body: bytes) -> None:
        self._num_heard += 1
        run = self._runs.get(number)
        if kind is Tell.READY:
            self.landlock_version = body[0]
            settle(self._ready, None)
        elif kind is Tell.PONG:
            if self._pong is not None:
                settle(self._pong, None)
            self._pong = None
        elif run is None:
            return
        elif kind in (Tell.STDOUT, Tell.STDERR):
            if body:
                run.on_output(kind, body)
        elif kind is Tell.STARTED:
            self._on_started(run)
        elif kind is Tell.CLOSED:
            run.on_output(Tell(body[0]), b"")
        elif kind is Tell.TAKEN:
            if run.taken is not None and not run.taken.done():
                run.taken.set_result(not body[0])
        else:
            outcome = Ended.read(body) if kind is Tell.ENDED else end_of_unstarted(body[0])
            del self._runs[number]
            self._settle(run, outcome)

    def _fail(self, reason: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Settle everything that waits for the agent."""
        self._unsent.clear()
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            error = SandboxError(f"the sandbox is gone, and its files with it: {reason}; acquire another")
            self._settle(run, self.blamed or error)
        settle(self._ready, SandboxError(f"the sandbox did not start: {reason}"))


def settle(future: asyncio.Future[Outcome], outcome: Outcome | SandboxError) -> None:
    """Give a future its outcome, unless its waiter has gone."""
    if future.done():
        return
    if isinstance(outcome, SandboxError):
        future.set_exception(outcome)
        future.exception()  # mark it as retrieved: a cancelled waiter does not ask for it
    else:
        future.set_result(outcome)


def end_of_unstarted(number: int) -> Ended | SandboxError:
    """Return the end of a program that could not be set up, given the errno: programs may have taken all memory."""
    if number == errno.ENOMEM:
        return OUT_OF_MEMORY
    hint = "; there are too many processes in this sandbox" if number == errno.EAGAIN else ""
    return SandboxError(f"the program could not be set up: {os.strerror(number) if number else 'no error'}{hint}")


PACKAGE = Path(__file__).parent
MODULES = ("wire", "files", "kernel", "interpreter", "program", "relay", "forker")
"""In the order of their imports."""
READER = """
import os, sys, types
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more: os._exit(0)
        data += more
    return data
data, texts = take(int.from_bytes(take(4), "big")), []
while data:
    end = 4 + int.from_bytes(data[:4], "big")
    texts.append(data[4:end])
    data = data[end:]
system_call_filter, *texts = texts
for name, source in zip(texts[::2], texts[1::2]):
    name = name.decode()
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__, module.__file__ = [], name
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules["sandboxes.agent.forker"].main(system_call_filter)
"""
COMMAND = ("python3", "-I", "-S", "-X", "utf8", "-c", READER)


def boot_data(system_call_filter: bytes) -> bytes:
    """Return what `COMMAND` reads first."""
    sources = {"sandboxes": b"", "sandboxes.agent": b""}
    for module in MODULES:
        sources[f"sandboxes.agent.{module}"] = PACKAGE.joinpath("agent", f"{module}.py").read_bytes()
    data = pack(system_call_filter, *(text for name, source in sources.items() for text in (name.encode(), source)))
    return len(data).to_bytes(4, "big") + data


BOOT = (
    "import sys, types; package = sys.modules['sandboxes'] = types.ModuleType('sandboxes'); "
    "package.__path__ = [sys.argv.pop(1)]; from sandboxes.agent.{module} import {function}; {function}()"
)
"""Runs a function of `agent/` without this package's `__init__`, whose imports are useless there."""


async def start_process(
    module: str, function: str, kind: int, setting: str
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a function of `agent/` with its setting; return the process and the host's end of its socket.

    The Python that it starts sees nothing of this package but `agent/`. Raises SandboxError.
    """
    ours, theirs = socket_pair(kind)
    python = (interpreter(), "-I", "-S", "-X", "utf8", "-c", BOOT.format(module=module, function=function))
    try:
        process = await asyncio.create_subprocess_exec(
            *python,
            str(PACKAGE),
            str(theirs.fileno()),
            setting,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,  # stderr stays ours: a traceback of the agent is a bug, to be seen
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the agent of sandboxes could not be started: {error}") from error
        raise
    finally:
        theirs.close()
    return process, ours


async def end_process(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """Wait for the end of a process. One that takes longer than `patience_s` is killed, its children first."""
    try:
        await asyncio.wait_for(process.wait(), patience_s)
    except TimeoutError:
        for pid in (*children_of(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


def socket_pair(kind: int) -> tuple[socket.socket, socket.socket]:
    """Return the host's socket and an agent's or a zygote's; SandboxError if too many files are open."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise SandboxError(f"a sandbox could not be started: {error}") from error
    ours.setblocking(False)
    return ours, theirs


def interpreter() -> str:
    """Return the real interpreter behind any virtual environment, which a jail does not show."""
    return os.path.realpath(sys.executable)


async def chunks_of(reader: asyncio.StreamReader) -> AsyncGenerator[tuple[bool, bytes], None]:
    """Yield what comes over a stream that carries an agent's frames and nothing else."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            yield False, data
