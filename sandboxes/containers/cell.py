"""A container as a cell.

`AgentCell` asks the container's agent to run programs and to handle files, over one stream. `ContainerProcess` is a
program whose output is read as it comes. The request functions pack what the agent is asked to do.

`PlainCell` is the cell of a container whose image has no Python: every program is an exec of the engine's.
"""

import asyncio
import os
import posixpath
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.base import Archives, Process, Program
from sandboxes.containers.agent.wire import EXECUTABLE, FILE, FOLDER, REQUEST, Ask, End, Operation, Tell, pack, unpack
from sandboxes.containers.agent_link import CHUNK_BYTES, AgentEnd, AgentLink, AgentRun
from sandboxes.containers.confinement import SharedBounds, User
from sandboxes.containers.engine import Engine, Stream, frames
from sandboxes.execution import result_of
from sandboxes.folder import Entry, checked, entries_of
from sandboxes.folder import pack as pack_tar
from sandboxes.link import Ended
from sandboxes.spec import ExecResult, Limits, Status, folder_parts, relative_parts

STATUS_OF_END = {End.DEADLINE: Status.TIMEOUT, End.OUTPUT: Status.OUTPUT_LIMIT}
MAX_WAITING_BYTES = 4 * 2**20
"""An honest agent has less in flight: it sends a chunk once the last was taken, and at the end what pipes hold."""


class Chunks:
    """The unread output of one stream. `on_taken` asks the agent for the next chunk."""

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._on_taken = on_taken
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, data: bytes) -> None:
        """Add a chunk; an empty one marks the end."""
        self.num_bytes += len(data)
        self._queue.put_nowait(data)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        data = await self._queue.get()
        if not data:
            self._queue.put_nowait(data)  # for another reader
            raise StopAsyncIteration
        self.num_bytes -= len(data)
        self._on_taken()
        return data


class ContainerProcess:
    """A program that the host talks with, once it was started."""

    def __init__(self, link: AgentLink, limits: Limits, *, is_timed: bool) -> None:
        self._link = link
        self._limits = limits
        self._writing = asyncio.Lock()
        self.run = AgentRun(limits.wall_s if is_timed else 0, self._on_output)
        self.stdout = Chunks(lambda: link.ask(Ask.MORE, self.run, bytes([Tell.STDOUT])))
        self.stderr = Chunks(lambda: link.ask(Ask.MORE, self.run, bytes([Tell.STDERR])))

    async def start(self, request: bytes) -> Self:
        await self._link.start(self.run, request, output_bytes=-1, is_paced=True)
        self.run.ended.add_done_callback(self._on_end)
        return self

    async def write(self, data: bytes) -> None:
        async with self._writing:
            if data and not await self._link.offer(self.run, data):
                raise BrokenPipeError("the program no longer reads its stdin")

    async def close_stdin(self) -> None:
        self._link.ask(Ask.CLOSE_STDIN, self.run)

    async def wait(self) -> ExecResult:
        end = await asyncio.shield(self.run.ended)
        return _result_of(end, b"", b"", self._limits)

    async def kill(self) -> None:
        self._link.kill(self.run)
        await asyncio.shield(self.run.ended)

    def _on_output(self, stream: Tell, data: bytes) -> None:
        chunks = self.stdout if stream is Tell.STDOUT else self.stderr
        chunks.put(data)
        if chunks.num_bytes > MAX_WAITING_BYTES:
            self._link.fail("it sends output that nobody asked for")

    def _on_end(self, _ended: object) -> None:
        for chunks in (self.stdout, self.stderr):
            chunks.put(b"")


def _result_of(end: AgentEnd, stdout: bytes, stderr: bytes, limits: Limits) -> ExecResult:
    return result_of(
        end.ended,
        stdout,
        stderr,
        limits,
        verdict=STATUS_OF_END.get(end.reason),
        is_truncated=end.is_cut,
        wall_s=end.wall_s,
        oom_kills=end.oom_kills,
        was_refused_processes=end.refused_forks > 0,
    )


UNBOUNDED = 2**63 - 1
MAX_FILE_DESCRIPTORS = 128


def program_request(program: Program, env: Mapping[str, str], user: User, limits: Limits, *, is_timed: bool) -> bytes:
    """Pack the request to run a program; `env` is its whole environment."""
    if program.source is None:
        operation, arguments = Operation.EXECUTABLE, [encoded(argument) for argument in program.argv]
    else:  # unchecked: its interpreter reports what is not Python, even half a character
        operation, arguments = Operation.SOURCE, [program.source.encode(errors="surrogatepass")]
    cpu_s = limits.max_cpu_s if is_timed else 0
    head = REQUEST.pack(operation, user.uid, user.gid, cpu_s, limits.file_bytes, limits.open_files)
    variables = [encoded(f"{name}={value}") for name, value in env.items()]
    return head + pack(folder_of(program.cwd), pack(*variables), *arguments)


def folder_of(path: str) -> bytes:
    """Return the path of a folder as bytes; PermissionError for one outside of the working directory."""
    return encoded("/".join(folder_parts(path)) or ".")


def file_of(path: str) -> bytes:
    return os.fsencode("/".join(relative_parts(path)))


def encoded(text: str) -> bytes:
    """Return a text as the kernel gets it; ValueError for one with a NUL byte."""
    data = os.fsencode(text)
    if b"\0" in data:
        raise ValueError(f"{text[:200]!r} holds a NUL byte, which no argument, path or variable may")
    return data


FILES_TIMEOUT_S = 60.0


@dataclass(eq=False)
class AgentCell:
    """The cell of a container with an agent. `remove` disposes of the container after the agent has ended."""

    link: AgentLink
    bounds: SharedBounds
    limits: Limits
    user: User
    env: Mapping[str, str]
    remove: Callable[[], Awaitable[None]]
    archives: Archives | None = None

    @property
    def is_alive(self) -> bool:
        return self.link.is_alive

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        request = self._request(program, limits, is_timed=True)
        async with self.bounds.held(limits):
            return await self._run(request, stdin, limits)

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> ContainerProcess:
        request = self._request(program, limits, is_timed=is_timed)
        await self.bounds.hold(limits)
        try:
            process = await ContainerProcess(self.link, limits, is_timed=is_timed).start(request)
        except BaseException:
            self.bounds.release()
            raise
        process.run.ended.add_done_callback(lambda _ended: self.bounds.release())
        return process

    async def read(self, path: str) -> bytes:
        return await self._do_files(Operation.READ, file_of(path), path, self.limits.file_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._do_files(Operation.WRITE, b"", path, 0, pack(FILE, file_of(path), data))

    async def upload(self, tar: bytes, path: str) -> None:
        triples = [FOLDER, b".", b""]
        for entry in await asyncio.to_thread(entries_of, tar):
            kind = FOLDER if entry.data is None else EXECUTABLE if entry.is_executable else FILE
            triples += kind, os.fsencode(entry.path), entry.data or b""
        await self._do_files(Operation.WRITE, folder_of(path), path, 0, pack(*triples))

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await asyncio.to_thread(tar_of, await self._do_files(Operation.LIST, folder_of(path), path, max_bytes))

    async def close(self) -> None:
        await self.link.aclose()
        await self.remove()

    def _request(self, program: Program, limits: Limits, *, is_timed: bool) -> bytes:
        limits.check_within(self.limits)
        return program_request(program, {**self.env, **program.env}, self.user, limits, is_timed=is_timed)

    async def _run(self, request: bytes, stdin: bytes, limits: Limits) -> ExecResult:
        output: dict[Tell, list[bytes]] = {Tell.STDOUT: [], Tell.STDERR: []}
        room = limits.output_bytes

        def keep(stream: Tell, data: bytes) -> None:
            nonlocal room
            room -= len(data)
            if room < 0:
                self.link.fail("it sends more output than was asked for")
            output[stream].append(data)

        is_short = len(stdin) <= CHUNK_BYTES
        run = AgentRun(limits.wall_s, keep)
        await self.link.start(run, request, output_bytes=room, is_paced=False, stdin=stdin if is_short else None)
        try:
            if not is_short:
                await self.link.feed(run, stdin)
            end = await run.ended
        finally:
            self.link.kill(run)
        return _result_of(end, b"".join(output[Tell.STDOUT]), b"".join(output[Tell.STDERR]), limits)

    async def _do_files(self, operation: Operation, name: bytes, path: str, max_bytes: int, data: bytes = b"") -> bytes:
        """Do something with the file or folder `name`; the errno, which the exit code holds, is raised as OSError."""
        head = REQUEST.pack(operation, self.user.uid, self.user.gid, 0, UNBOUNDED, MAX_FILE_DESCRIPTORS)
        request = head + pack(b".", b"", name, b"%d" % max_bytes)
        slack = 64 * 1024  # for the packing
        limits = Limits(wall_s=FILES_TIMEOUT_S, output_bytes=max_bytes * 2 + slack)
        async with self.bounds.slots:
            result = await self._run(request, data, limits)
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        if not result.is_ok:
            raise OSError(f"the files of this sandbox cannot be accessed: {result.status.value}")
        return result.stdout


def tar_of(packed: bytes) -> bytes:
    """Make a tar of what an agent lists; SandboxError when the list is malformed."""
    try:
        texts = unpack(packed)
        entries = [
            Entry(path=os.fsdecode(name), data=None if kind == FOLDER else data, is_executable=kind == EXECUTABLE)
            for kind, name, data in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
        ]
        return checked(pack_tar(entries))
    except ValueError as error:
        raise SandboxError(f"the container sent a malformed list of files: {error}") from error


PLAIN_COMMAND = ("cat",)
"""The first process of a container without an agent. It ends with the stream to the host, and the container with it."""
LIMITED = 'ulimit -c 0 && ulimit -t "$1" && ulimit -f "$2" && ulimit -n "$3" && shift 3 && exec "$@"'
KILL_THE_REST = "kill -9 -1; cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events 2> /dev/null"
WRITE = 'case "$1" in */*) mkdir -p "${1%/*}";; esac && rm -f "$1" && cat > "$1"'
READ = '[ -f "$1" ] && [ ! -L "$1" ] && cat "$1"'
FILE_BLOCK_BYTES = 512
CLEAN_UP = Limits(wall_s=30.0, output_bytes=4096)


@dataclass(eq=False)
class PlainCell:
    """The cell of a container without an agent; one program runs at a time. The image needs `sh`, `cat` and `kill`.

    Reading output as it comes, and tars of folders, are refused. After each program a shell of the same user kills all
    other processes of the container; the kernel spares the shell itself.
    """

    engine: Engine
    container: str
    bounds: SharedBounds
    limits: Limits
    env: Mapping[str, str]
    workdir: str
    remove: Callable[[], Awaitable[None]]
    archives: Archives | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _living: asyncio.Task[bytes] | None = None  # ends with the container
    _num_oom_kills: int = 0

    async def start(self) -> Self:
        """Start the container, which was made with `PLAIN_COMMAND`."""
        reader, self._writer = await self.engine.attach(self.container)
        self._living = asyncio.create_task(reader.read())
        try:
            await self.engine.start(self.container)
        except BaseException:
            self._hang_up()
            raise
        return self

    @property
    def is_alive(self) -> bool:
        return self._living is not None and not self._living.done()

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        argv = program.argv or ("python3", "-c", program.source or "")
        numbers = (limits.max_cpu_s, max(1, limits.file_bytes // FILE_BLOCK_BYTES), limits.open_files)
        command, cwd = shell(LIMITED, *map(str, numbers), *argv), "/".join(folder_parts(program.cwd))
        async with self._turn, self.bounds.held(limits):
            return await self._run(command, stdin, limits, {**self.env, **program.env}, cwd)

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> Process:
        raise SandboxError("a program's output cannot be read as it comes from an image without python3; use exec")

    async def read(self, path: str) -> bytes:
        return await self._do(READ, path, b"", self.limits.file_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._do(WRITE, path, data, 1)

    async def upload(self, tar: bytes, path: str) -> None:
        raise SandboxError("folders cannot be uploaded to an image without python3; write the files one by one")

    async def download(self, path: str, max_bytes: int) -> bytes:
        raise SandboxError("folders cannot be downloaded from an image without python3; read the files one by one")

    async def close(self) -> None:
        self._hang_up()
        await self.remove()

    def _hang_up(self) -> None:
        if self._living is not None:
            self._living.cancel()
            self._writer.transport.abort()

    async def _do(self, script: str, path: str, data: bytes, max_bytes: int) -> bytes:
        limits = Limits(wall_s=FILES_TIMEOUT_S, output_bytes=max_bytes)
        async with self._turn:
            result = await self._run(shell(script, "/".join(relative_parts(path))), data, limits, self.env)
        if not result.is_ok:
            raise OSError(f"{path!r} cannot be reached: {result.status.value} {result.stderr[-200:]!r}")
        return result.stdout

    async def _run(
        self, command: Sequence[str], stdin: bytes, limits: Limits, env: Mapping[str, str], cwd: str = ""
    ) -> ExecResult:
        if not self.is_alive:
            raise SandboxError("the container of this sandbox is gone, and its files with it; acquire another")
        started_s = time.monotonic()
        try:
            number, stream = await self.engine.exec(self.container, command, env, posixpath.join(self.workdir, cwd))
            stdout, stderr, verdict = await talk(stream, stdin, limits)
        finally:
            oom_kills = await asyncio.shield(asyncio.ensure_future(self._kill_the_rest()))
        code = await self.engine.exit_code(number)
        code = 128 + signal.SIGKILL if code is None else code  # above 128 it means a signal, as in a shell
        wait_status = code - 128 if 128 < code <= 128 + signal.NSIG else code << 8
        return result_of(
            Ended(wait_status=wait_status, cpu_s=0.0, peak_memory_bytes=0),
            stdout,
            stderr,
            limits,
            verdict=verdict,
            is_truncated=verdict is Status.OUTPUT_LIMIT,
            wall_s=time.monotonic() - started_s,
            oom_kills=oom_kills,
        )

    async def _kill_the_rest(self) -> int:
        """Kill what a program left, and return how many processes ran out of memory since the last call."""
        _, stream = await self.engine.exec(self.container, shell(KILL_THE_REST), self.env, self.workdir)
        stdout, _, verdict = await talk(stream, b"", CLEAN_UP)
        if verdict is Status.TIMEOUT:
            await self.close()
            raise SandboxError("the processes of a container could not be killed; it was removed")
        words = stdout.split()
        counted = int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0
        before, self._num_oom_kills = self._num_oom_kills, counted
        return counted - before


def shell(script: str, *arguments: str) -> Sequence[str]:
    """Return the command for a script, which first waits for a line: it comes when the host can hear the script."""
    return ("sh", "-c", f"read -r _ || exit 1; {script}", "sh", *arguments)


async def talk(stream: Stream, stdin: bytes, limits: Limits) -> tuple[bytes, bytes, Status | None]:
    """Talk with an exec until it ends, and return stdout, stderr, and why it has to be killed, if it has."""
    reader, writer = stream
    stdout, stderr = output = bytearray(), bytearray()
    room, verdict = limits.output_bytes, None
    try:
        writer.write(b"\n" + stdin)
        writer.write_eof()
        async with asyncio.timeout(limits.wall_s):
            async for is_error, data in frames(reader):
                output[is_error].extend(data[:room])
                if len(data) > room:
                    verdict = Status.OUTPUT_LIMIT
                    break
                room -= len(data)
    except TimeoutError:
        verdict = Status.TIMEOUT
    finally:
        writer.transport.abort()
    return bytes(stdout), bytes(stderr), verdict
