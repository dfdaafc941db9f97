"""The host's end of an agent: it starts runs, feeds them, and hands out what comes of each; and how an agent is sent.

What comes out of a container is not trusted: a malformed frame, or more output than was allowed, ends the container.

The agent gets into a container through a command line (`COMMAND`) that reads modules from its standard input
(`boot_data`). So an image needs a python3 and nothing of ours, and a container always has its host's agent.
"""

import asyncio
import contextlib
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

from areal_agent.errors import SandboxError
from sandboxes.containers.agent.wire import ENDED, HEADER, MAX_PAYLOAD_BYTES, START, Ask, End, Tell, pack, whole_frames
from sandboxes.containers.engine import frames
from sandboxes.link import Ended, settle

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
"""An agent ends with its stream, within milliseconds; otherwise the engine kills it with its container."""
CHUNK_BYTES = 65_536
MAX_DIAGNOSIS_BYTES = 4096


class AgentEnd:
    """The end of a run, as its agent and the kernel report it."""

    def __init__(self, body: bytes) -> None:
        numbers = ENDED.unpack(body)
        os.waitstatus_to_exitcode(numbers[0])  # ValueError for an invalid status
        self.ended = Ended(wait_status=numbers[0], cpu_s=numbers[2] / 1e6, peak_memory_bytes=numbers[3])
        self.wall_s: float = numbers[1] / 1e6  # as the agent measured it: the host hears of a start late
        self.oom_kills: int = numbers[4]
        self.refused_forks: int = numbers[5]
        self.reason = End(numbers[6])
        self.is_cut: bool = numbers[7]


class AgentRun:
    """One run, to be started by a link. `ended` raises SandboxError when the container could not run it to its end.

    `wall_s` counts from the program's start; 0 is no deadline. `on_output` takes chunks of stdout and stderr; an empty
    one means that the program has closed it.
    """

    def __init__(self, wall_s: float, on_output: Callable[[Tell, bytes], None]) -> None:
        self.wall_s = wall_s
        self.on_output = on_output
        self.number = 0  # set at its start
        self.ended: asyncio.Future[AgentEnd] = asyncio.get_running_loop().create_future()
        self.taken: asyncio.Future[bool] | None = None  # whether stdin took what it was given
        self.is_killed = False
        self.has_started = False
        self._timer: asyncio.TimerHandle | None = None  # for the next step if nothing is heard of the run

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class AgentLink:
    """The connection to one agent, over the stream of its container. End it with `aclose`; the container ends too."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silence_s: float = SILENCE_S
    ) -> None:
        self._writer = writer
        self._silence_s = silence_s
        self.has_filter = False  # of system calls, besides the engine's
        self.is_given_up = False  # its stream was closed from here, so it may still live
        self._loop = asyncio.get_running_loop()
        self.is_alive = True
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._runs: dict[int, AgentRun] = {}
        self._next_number = 1
        self._room = asyncio.Semaphore(MAX_ON_THE_WAY)
        self._unsent = bytearray()
        self._received = bytearray()
        self._num_heard = 0
        self._reading = asyncio.create_task(self._read(reader))

    async def boot(self, data: bytes) -> None:
        """Send the agent, and wait until it serves."""
        self._writer.write(data)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._ready
        except TimeoutError:
            raise SandboxError(f"the agent of a container did not start within {READY_TIMEOUT_S:g} s") from None

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
            raise SandboxError("the container of this sandbox is gone, and its files with it; acquire another")
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
        """Kill a run; harmless when it has ended. The container is given up if the run does not die."""
        if run.number in self._runs and not run.is_killed:
            run.is_killed = True
            self.ask(Ask.KILL, run)
            self._expect(run)

    async def aclose(self) -> None:
        """End the agent. On return all processes of the container are dead, or `is_given_up` is set."""
        self._fail("it was closed")
        self._writer.write_eof()
        await asyncio.wait([self._reading], timeout=END_PATIENCE_S)
        self._give_up()

    def fail(self, reason: str) -> None:
        """Give the container up."""
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
        if run.number not in self._runs:
            return
        if not self._unsent:
            self._loop.call_soon(self._send)  # batch what is sent in one moment
        self._unsent += HEADER.pack(kind, run.number, len(body)) + body

    def _send(self) -> None:
        if self._unsent:
            self._writer.write(bytes(self._unsent))
        self._unsent.clear()

    # ── what is waited for ────────────────────────────────────────────────────────────────────────────────────────

    def _expect(self, run: AgentRun, num_silences: int = 0) -> None:
        """Expect the run's start or, once it is killed, its end."""
        run.set_timer(self._loop.call_later(self._silence_s, self._on_silence, run, self._num_heard, num_silences))

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

    def _settle(self, run: AgentRun, outcome: AgentEnd | SandboxError) -> None:
        """Give a run, which was removed from `_runs`, its outcome, unless its waiter has gone."""
        run.set_timer(None)
        if not run.has_started:
            self._room.release()
        settle(run.ended, outcome)

    # ── what comes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, reader: asyncio.StreamReader) -> None:
        diagnosis = b""
        async for is_error, data in frames(reader):
            if is_error:
                diagnosis = (diagnosis + data)[-MAX_DIAGNOSIS_BYTES:]
            else:
                self._on_data(data)
        told = diagnosis.decode(errors="replace").strip()
        self._fail(f"it ended by itself{': ' + told if told else ''}")

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
            self.has_filter = bool(body[0])
            settle(self._ready, None)
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
            outcome = AgentEnd(body) if kind is Tell.ENDED else refusal(body[0])
            del self._runs[number]
            self._settle(run, outcome)

    def _fail(self, reason: str) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._unsent.clear()
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            self._settle(run, SandboxError(f"the container of this sandbox is gone: {reason}"))
        settle(self._ready, SandboxError(f"a container did not start: {reason}"))


def refusal(number: int) -> SandboxError:
    """Return the error for a program that could not be set up."""
    hint = "; there are too many processes in this sandbox" if number == errno.EAGAIN else ""
    return SandboxError(f"the program could not be set up: {os.strerror(number) if number else 'no error'}{hint}")


PACKAGE = Path(__file__).parent.parent
MODULES = (
    "inner.processes",
    "inner.files",
    "inner.kernel",
    "inner.program",
    "containers.agent.wire",
    "containers.agent.program",
    "containers.agent.relay",
    "containers.agent.forker",
)
"""In the order of their imports. `kernel` and `program` fail where Python has no `ctypes`; the agent does without."""
PACKAGES = ("sandboxes", "sandboxes.inner", "sandboxes.containers", "sandboxes.containers.agent")
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
    try: exec(compile(source, name, "exec"), module.__dict__)
    except ImportError: del sys.modules[name]
sys.modules["sandboxes.containers.agent.forker"].main(system_call_filter)
"""
COMMAND = ("python3", "-I", "-S", "-X", "utf8", "-c", READER)


def boot_data(system_call_filter: bytes) -> bytes:
    """Return what `COMMAND` reads first."""
    sources = {name: b"" for name in PACKAGES}
    for module in MODULES:
        sources[f"sandboxes.{module}"] = PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_bytes()
    data = pack(system_call_filter, *(text for name, source in sources.items() for text in (name.encode(), source)))
    return len(data).to_bytes(4, "big") + data
