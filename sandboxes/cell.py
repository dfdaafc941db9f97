"""A cell whose programs an agent runs, and the process that the host talks with: the same for every backend.

`Cell` asks the agent to run programs. `FolderCell` adds the files of a working folder that the host itself can open,
`ContainerCell` those of one that only its agent can reach. `result_of` decides how a program ended.
"""

import asyncio
import contextlib
import os
import secrets
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple, Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.agent.wire import REQUEST, Ask, End, Operation, Tell, pack
from sandboxes.cgroups import SharedBounds
from sandboxes.folder import Entry, OpenFolder, for_agent, of_agent
from sandboxes.link import CHUNK_BYTES, AgentLink, AgentRun, Ended
from sandboxes.spec import ExecResult, Limits, Program, Status, folder_parts, relative_parts

Answer = TypeVar("Answer")
STATUS_OF_END = {End.DEADLINE: Status.TIMEOUT, End.OUTPUT: Status.OUTPUT_LIMIT, End.DISK: Status.DISK}
MAX_WAITING_BYTES = 4 * 2**20
"""An honest agent has less in flight: it sends a chunk once the last was taken, and at the end what pipes hold."""
NEARLY_ALL_MEMORY = 0.9
"""Without a control group, a failed program ran out of memory if it had this share of its limit resident."""
MUCH_CPU = 0.5
"""A program killed at its CPU limit may seem to have used only this share, where a virtual machine was held up."""
OF_FILES = Limits(wall_s=60.0, open_files=128, file_bytes=2**63 - 1)
"""Of a container's process that handles files: its disk bounds what it writes."""
PACKING_BYTES = 64 * 1024
OF_OURS = Limits(open_files=256)
"""Of a process of ours among the programs."""
PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"


class User(NamedTuple):
    """The user and group that programs run as."""

    uid: int
    gid: int


FIRST_UID, NUM_UIDS = 0x7000_0000, 2**27
"""Users that no distribution gives to anybody."""


def fresh_user() -> User:
    """Return a user for one sandbox. The kernel counts some resources by user, which sandboxes must not share."""
    uid = FIRST_UID + secrets.randbelow(NUM_UIDS)
    return User(uid=uid, gid=uid)


@dataclass(frozen=True, slots=True)
class Archives:
    """The way to any path of a sandbox whose image can be written to: tars with owners, modes and links.

    `save` writes a tar of a path; OSError if that is a link, missing or too long. `load` unpacks one in a folder.
    """

    save: Callable[[str, BinaryIO, int], Awaitable[None]]  # path, target, most bytes
    load: Callable[[BinaryIO | bytes, str], Awaitable[None]]  # tar, folder


@dataclass(eq=False, kw_only=True)
class Cell(ABC):
    """A working directory in which any number of programs run at once. Its parts say how the backends differ.

    Cancelling a call kills its program. Paths are relative to the working directory, whose files may be hostile: no
    link is followed. A file that is missing, is a link or is too long raises OSError, as opening a file does.

    `reach` returns the agent to use now. `bounds` are those of all programs together; where there are none,
    `process_bounds` returns for some limits the most bytes of address space and processes, or refuses them.
    `has_users` tells whether processes may run as other users than the programs. `parts` are ended when the cell is
    closed, the last one first. `archives` leads beyond the working directory.
    """

    reach: Callable[[], Awaitable[AgentLink]]
    home: str
    env: Mapping[str, str]
    user: User
    limits: Limits
    bounds: SharedBounds | None
    process_bounds: Callable[[Limits], tuple[int, int]] = lambda _limits: (0, 0)
    has_users: bool
    parts: contextlib.AsyncExitStack
    archives: Archives | None = None
    runs: set[AgentRun] = field(default_factory=set[AgentRun])
    _closing: asyncio.Future[None] | None = None

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Return the bytes of a regular file, which may be as long as the cell's `Limits.file_bytes`."""

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Write a file, replacing any old one, and make its parent folders."""

    @abstractmethod
    async def upload(self, entries: Sequence[Entry], path: str) -> None:
        """Write files and folders into a folder, which is made if missing. Their paths lead nowhere else."""

    @abstractmethod
    async def download(self, path: str, max_bytes: int) -> list[Entry]:
        """Return the files and folders of a folder, with paths relative to it; OSError above `max_bytes`."""

    async def answers(self) -> bool:
        """Return whether the cell can run anything, which it is asked."""
        return self._closing is None and await (await self.reach()).answers()

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        """Run a program to its end."""
        request = self._request(program, limits, is_timed=True)
        link = await self.reach()
        async with contextlib.nullcontext() if self.bounds is None else self.bounds.held(limits):
            result = await self.run(link, request, stdin, limits)
        self.check_open()
        return result

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> "Process":
        """Start a program, which lives until it ends, is killed, or the cell is closed.

        Its output is not bounded. Only if `is_timed` do `limits.wall_s` and `limits.cpu_s` apply.
        """
        request = self._request(program, limits, is_timed=is_timed)
        process = Process(await self.reach(), limits, is_timed=is_timed, has_group=self.bounds is not None)
        if self.bounds is not None:
            await self.bounds.hold(limits, is_timed=is_timed)
        try:
            await process.start(request)
        except BaseException:
            if self.bounds is not None:
                self.bounds.release(is_timed=is_timed)
            raise
        self._follow(process.run)
        if (bounds := self.bounds) is not None:
            process.run.ended.add_done_callback(lambda _ended: bounds.release(is_timed=is_timed))
        return process

    async def start_own(self, source: bytes) -> "Process":
        """Start Python source of ours, which no program can signal or trace if there are other users."""
        self.check_open()
        user, home = (fresh_user(), b"/") if self.has_users else (self.user, encoded(self.home))
        bounds = self.process_bounds(OF_OURS)
        request = request_of(Operation.SOURCE, user, OF_OURS, home, b".", {}, [source], bounds, is_timed=False)
        process = Process(await self.reach(), OF_OURS, is_timed=False, has_group=self.bounds is not None)
        await process.start(request)
        self._follow(process.run)
        return process

    async def close(self) -> None:
        """Kill what runs in the cell and remove its files. Harmless when it is closed already."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self.parts.aclose())
        await asyncio.shield(self._closing)

    @property
    def is_closed(self) -> bool:
        return self._closing is not None and self._closing.done()

    async def run(self, link: AgentLink, request: bytes, stdin: bytes, limits: Limits) -> ExecResult:
        """Run what is requested to its end."""
        output: dict[Tell, list[bytes]] = {Tell.STDOUT: [], Tell.STDERR: []}
        room = limits.output_bytes

        def keep(stream: Tell, data: bytes) -> None:
            nonlocal room
            room -= len(data)
            if room < 0:
                link.fail("it sends more output than was asked for")
            output[stream].append(data)

        is_short = len(stdin) <= CHUNK_BYTES
        run = AgentRun(limits.wall_s, keep)
        try:
            await link.start(run, request, output_bytes=room, is_paced=False, stdin=stdin if is_short else None)
            self._follow(run)
            if not is_short:
                await link.feed(run, stdin)
            end = await run.ended
        finally:
            link.kill(run)
        stdout, stderr = (b"".join(output[stream]) for stream in (Tell.STDOUT, Tell.STDERR))
        return result_of(end, limits, stdout, stderr, has_group=self.bounds is not None)

    def check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox is closed; acquire another")

    def slots(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return what is to be held while a process is needed that is not a program."""
        return contextlib.nullcontext() if self.bounds is None else self.bounds.slots

    def _request(self, program: Program, limits: Limits, *, is_timed: bool) -> bytes:
        self.check_open()
        process_bounds = self.process_bounds(limits)
        limits.check_within(self.limits)
        if program.source is None:
            operation, arguments = Operation.EXECUTABLE, [encoded(argument) for argument in program.argv]
        else:  # unchecked: its interpreter reports what is not Python, even half a character
            operation, arguments = Operation.SOURCE, [program.source.encode(errors="surrogatepass")]
        cwd, env = folder_of(program.cwd), {**self.env, **program.env}
        return request_of(
            operation, self.user, limits, encoded(self.home), cwd, env, arguments, process_bounds, is_timed=is_timed
        )

    def _follow(self, run: AgentRun) -> None:
        """Know of a run until it has ended, which is later than its caller was cancelled."""
        self.runs.add(run)
        run.ended.add_done_callback(lambda _ended: self.runs.discard(run))


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


class Process:
    """A running program, whose output can be read as it is printed, in chunks, until the program closes it or dies.

    Unread output stays in the pipe, and the program blocks when the pipe is full: nothing piles up in the host.
    """

    def __init__(self, link: AgentLink, limits: Limits, *, is_timed: bool, has_group: bool) -> None:
        self._link = link
        self._limits = limits
        self._has_group = has_group
        self._writing = asyncio.Lock()
        self.run = AgentRun(limits.wall_s if is_timed else 0, self._on_output)
        self.stdout = Chunks(lambda: link.ask(Ask.MORE, self.run, bytes([Tell.STDOUT])))
        self.stderr = Chunks(lambda: link.ask(Ask.MORE, self.run, bytes([Tell.STDERR])))

    async def start(self, request: bytes) -> Self:
        await self._link.start(self.run, request, output_bytes=-1, is_paced=True)
        self.run.ended.add_done_callback(self._on_end)
        return self

    async def write(self, data: bytes) -> None:
        """Write to the program's stdin as it takes the data; BrokenPipeError when nobody will read it."""
        async with self._writing:
            if data and not await self._link.offer(self.run, data):
                if self.run.ended.done():
                    self.run.ended.result()  # a sandbox that is gone is not the program's failure
                raise BrokenPipeError("the program no longer reads its stdin")

    async def close_stdin(self) -> None:
        self._link.ask(Ask.CLOSE_STDIN, self.run)

    async def wait(self) -> ExecResult:
        """Wait for the end and return the result, without output. Any number of calls may wait."""
        return result_of(await asyncio.shield(self.run.ended), self._limits, has_group=self._has_group)

    async def kill(self) -> None:
        """Kill the program and all its descendants, and wait until they are dead. Harmless when they are."""
        self._link.kill(self.run)
        await asyncio.wait([self.run.ended])

    def _on_output(self, stream: Tell, data: bytes) -> None:
        chunks = self.stdout if stream is Tell.STDOUT else self.stderr
        chunks.put(data)
        if chunks.num_bytes > MAX_WAITING_BYTES:
            self._link.fail("it sends output that nobody asked for")

    def _on_end(self, _ended: object) -> None:
        for chunks in (self.stdout, self.stderr):
            chunks.put(b"")


@dataclass(eq=False, kw_only=True)
class FolderCell(Cell):
    """A cell with a working folder that the host can open: `open_folder` does."""

    open_folder: Callable[[], Awaitable[int]]

    async def read(self, path: str) -> bytes:
        return await self._with_folder(lambda folder: folder.read(path, self.limits.file_bytes))

    async def write(self, path: str, data: bytes) -> None:
        await self._with_folder(lambda folder: folder.write(path, data))

    async def upload(self, entries: Sequence[Entry], path: str) -> None:
        def unpack(folder: OpenFolder) -> None:
            folder.make_folder(path)
            for entry in entries:
                place = str(PurePosixPath(path, entry.path))
                if entry.data is None:
                    folder.make_folder(place)
                else:
                    folder.write(place, entry.data, is_executable=entry.is_executable)

        await self._with_folder(unpack)

    async def download(self, path: str, max_bytes: int) -> list[Entry]:
        return await self._with_folder(lambda folder: list(folder.entries(path, max_bytes)))

    async def _with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        """Act on the folder in a thread, through a descriptor of its own, which a concurrent close cannot pull away."""
        self.check_open()
        descriptor = await self.open_folder()
        try:
            return await asyncio.to_thread(act, OpenFolder(descriptor, self.user.uid if self.has_users else None))
        finally:
            os.close(descriptor)


@dataclass(eq=False, kw_only=True)
class ContainerCell(Cell):
    """A cell whose folder only its agent can reach: a process with the rights of its programs handles their files."""

    async def read(self, path: str) -> bytes:
        return await self._act(Operation.READ, "/".join(relative_parts(path)), path, self.limits.file_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._act(Operation.WRITE, "", path, 0, for_agent([Entry("/".join(relative_parts(path)), data)]))

    async def upload(self, entries: Sequence[Entry], path: str) -> None:
        await self._act(Operation.WRITE, *self._folder(path), 0, for_agent([Entry(".", None), *entries]))

    async def download(self, path: str, max_bytes: int) -> list[Entry]:
        packed = await self._act(Operation.LIST, *self._folder(path), max_bytes)
        return await asyncio.to_thread(of_agent, packed, max_bytes)

    @staticmethod
    def _folder(path: str) -> tuple[str, str]:
        return "/".join(folder_parts(path)) or ".", path

    async def _act(self, operation: Operation, name: str, path: str, max_bytes: int, stdin: bytes = b"") -> bytes:
        """Act on the file or folder `name`; the errno, which the exit code holds, is raised as OSError."""
        arguments = [os.fsencode(name), b"%d" % max_bytes]
        request = request_of(operation, self.user, OF_FILES, encoded(self.home), b".", {}, arguments, is_timed=False)
        limits = replace(OF_FILES, output_bytes=max_bytes * 2 + PACKING_BYTES)
        link = await self.reach()
        await link.check_alive()
        async with contextlib.nullcontext() if self.bounds is None else self.bounds.slots:
            result = await self.run(link, request, stdin, limits)
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        if not result.is_ok:
            raise OSError(f"the files of this sandbox cannot be accessed: {result.status.value}")
        return result.stdout


AnyCell = TypeVar("AnyCell", bound=Cell)


class Cells:
    """The open cells of one provider. `release` gives up what the provider holds, once all cells are closed."""

    def __init__(self, release: Callable[[], Awaitable[None]]) -> None:
        self._release = release
        self._open: set[Cell] = set()
        self._closing: asyncio.Task[None] | None = None

    def check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox pool is closed; open another")

    async def add(self, cell: AnyCell) -> AnyCell:
        """Take a cell on; SandboxError when all were closed meanwhile, and then it is closed too."""
        if self._closing is not None:
            await cell.close()
        self.check_open()
        self._open = {cell, *(other for other in self._open if not other.is_closed)}
        return cell

    async def close(self) -> None:
        """Close every cell, then the provider. Harmless when both are closed already."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(cell.close() for cell in tuple(self._open)))
        await self._release()


def request_of(
    operation: Operation,
    user: User,
    limits: Limits,
    home: bytes,
    cwd: bytes,
    env: Mapping[str, str],
    arguments: Sequence[bytes],
    process_bounds: tuple[int, int] = (0, 0),
    *,
    is_timed: bool,
) -> bytes:
    """Pack a request as `agent/program.py` reads it; `env` is the whole environment."""
    cpu_s = limits.max_cpu_s if is_timed else 0
    head = REQUEST.pack(operation, *user, cpu_s, limits.file_bytes, limits.open_files, *process_bounds)
    variables = [encoded(f"{name}={value}") for name, value in env.items()]
    return head + pack(home, cwd, pack(*variables), *arguments)


def folder_of(path: str) -> bytes:
    """Return the path of a folder as bytes; PermissionError for one outside of the working directory."""
    return encoded("/".join(folder_parts(path)) or ".")


def encoded(text: str) -> bytes:
    """Return a text as the kernel gets it. One that has no such form gets a NUL, with which no program can be run."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass") + b"\0"


def base_environment(home: str) -> dict[str, str]:
    """Return the environment of a program whose working directory it sees as `home`."""
    return {"PATH": PROGRAM_PATH, "HOME": home, "TMPDIR": home}


def result_of(ended: Ended, limits: Limits, stdout: bytes = b"", stderr: bytes = b"", *, has_group: bool) -> ExecResult:
    """Return the result of a program.

    What its control group counted goes before the reason for which its agent had it killed, if it did. Nothing that the
    program printed can make it OK.
    """
    code = os.waitstatus_to_exitcode(ended.wait_status)
    if ended.oom_kills:
        status = Status.MEMORY
    elif ended.refused_forks:
        status = Status.PIDS
    else:
        status = STATUS_OF_END.get(ended.reason) or status_of(code, ended, stderr, limits, has_group=has_group)
    return ExecResult(
        status=status,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=stdout,
        stderr=stderr,
        truncated=ended.is_cut,
        wall_s=ended.wall_s,
        cpu_s=ended.cpu_s,
        peak_memory_bytes=ended.peak_memory_bytes,
        oom_kills=ended.oom_kills,
    )


def status_of(code: int, ended: Ended, stderr: bytes, limits: Limits, *, has_group: bool = False) -> Status:
    """Return the status of a program that the host did not kill; `code` is its exit code, or minus its signal.

    Only the kernel decides whether it is OK. The reason for a failure is partly read from what the program did: it may
    pass off one failure as another, never as success. Running out of address space or disk has no signal of its own, so
    the last line of stderr is searched for signs of it.
    """
    if code == 0:
        return Status.OK
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and ended.cpu_s >= MUCH_CPU * limits.max_cpu_s):
        return Status.TIMEOUT
    if code == -signal.SIGXFSZ:
        return Status.DISK
    last_line = stderr.rstrip(b"\n").rpartition(b"\n")[2]
    if last_line.startswith(b"MemoryError"):
        return Status.MEMORY
    if not has_group and ended.peak_memory_bytes >= NEARLY_ALL_MEMORY * limits.memory_bytes:
        return Status.MEMORY
    if b"No space left on device" in last_line:
        return Status.DISK
    return Status.NONZERO if code > 0 else Status.SIGNALED
