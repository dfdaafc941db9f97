"""A container whose image has no Python, as a cell: every program is an exec of the engine's, one at a time.

The image needs `sh`, `cat` and `kill`. Reading output as it comes, and tars of folders, are refused. After each program
a shell of the same user kills all other processes of the container; the kernel spares the shell itself.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.base import Process, Program
from sandboxes.containers.confinement import SharedBounds
from sandboxes.containers.engine import Engine, EngineStream
from sandboxes.execution import result_of
from sandboxes.link import Ended
from sandboxes.spec import ExecResult, Limits, Status, relative_parts

COMMAND = ("cat",)
"""The container's first process. It ends when the stream to the host ends, and the container with it."""
LIMITED = 'ulimit -c 0 && ulimit -t "$1" && ulimit -f "$2" && ulimit -n "$3" && shift 3 && exec "$@"'
KILL_THE_REST = "kill -9 -1; cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events 2> /dev/null"
WRITE = 'case "$1" in */*) mkdir -p "${1%/*}";; esac && rm -f "$1" && cat > "$1"'
READ = '[ -f "$1" ] && [ ! -L "$1" ] && cat "$1"'
FILE_BLOCK_BYTES = 512
CLEAN_UP_TIMEOUT_S = 30.0
FILES_WALL_S = 60.0


class Exec:
    """One exec of the engine: its output, and an event for its end."""

    def __init__(self, max_bytes: int) -> None:
        self.ended = asyncio.Event()
        self.output: tuple[list[bytes], list[bytes]] = ([], [])
        self.is_cut = False
        self._room = max_bytes

    def keep(self, stream: int, data: bytes) -> None:
        if len(data) > self._room:
            self.is_cut = True
            self.ended.set()
        self.output[stream].append(data[: self._room])
        self._room -= min(len(data), self._room)


class PlainCell:
    """The cell of a container without an agent. Run `start` first."""

    def __init__(
        self,
        engine: Engine,
        container: str,
        bounds: SharedBounds,
        limits: Limits,
        env: Mapping[str, str],
        remove: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._container = container
        self._bounds = bounds
        self._limits = limits
        self._env = env
        self._remove = remove
        self._turn = asyncio.Lock()
        self._gone = asyncio.Event()
        self._stream: EngineStream | None = None
        self._num_oom_kills = 0

    async def start(self) -> Self:
        """Start the container, which was made with `COMMAND`."""
        self._stream = await EngineStream.attach(self._engine.socket_path, self._container, on_end=self._gone.set)
        await self._engine.start(self._container)
        return self

    @property
    def is_alive(self) -> bool:
        return not self._gone.is_set()

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        argv = program.argv or ("python3", "-c", program.source or "")
        numbers = (limits.max_cpu_s, max(1, limits.file_bytes // FILE_BLOCK_BYTES), limits.open_files)
        command = ["sh", "-c", LIMITED, "sh", *(str(number) for number in numbers), *argv]
        env = {**self._env, **program.env}
        folder = "/".join(relative_parts(program.cwd)) if program.cwd != "." else ""
        async with self._turn, self._bounds.held(limits):
            return await self._run(command, stdin, limits, env, folder)

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> Process:
        raise SandboxError("a program's output cannot be read as it comes from an image without python3; use exec")

    async def read(self, path: str) -> bytes:
        max_bytes = self._limits.file_bytes
        return (await self._do(READ, path, b"", max_bytes)).stdout

    async def write(self, path: str, data: bytes) -> None:
        await self._do(WRITE, path, data, 1)

    async def upload(self, tar: bytes, path: str) -> None:
        raise SandboxError("folders cannot be uploaded to an image without python3; write the files one by one")

    async def download(self, path: str, max_bytes: int) -> bytes:
        raise SandboxError("folders cannot be downloaded from an image without python3; read the files one by one")

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        await self._remove()

    async def _do(self, script: str, path: str, data: bytes, max_bytes: int) -> ExecResult:
        name = "/".join(relative_parts(path))
        limits = Limits(wall_s=FILES_WALL_S, output_bytes=max_bytes)
        async with self._turn:
            result = await self._run(["sh", "-c", script, "sh", name], data, limits, self._env, "")
        if not result.is_ok:
            raise OSError(f"{path!r} cannot be reached: {result.status.value} {result.stderr[-200:]!r}")
        return result

    async def _run(
        self, command: Sequence[str], stdin: bytes, limits: Limits, env: Mapping[str, str], folder: str
    ) -> ExecResult:
        if not self.is_alive:
            raise SandboxError("the container of this sandbox is gone, and its files with it; acquire another")
        started_s = time.monotonic()
        run, number = await self._start_exec(command, stdin, env, folder, limits.output_bytes)
        try:
            async with asyncio.timeout(limits.wall_s):
                await run.ended.wait()
            verdict = Status.OUTPUT_LIMIT if run.is_cut else None
        except TimeoutError:
            verdict = Status.TIMEOUT
        finally:
            oom_kills = await asyncio.shield(asyncio.ensure_future(self._kill_the_rest()))
        code = await self._engine.exit_code(number)
        return _result_of(run, code, verdict, oom_kills, limits, time.monotonic() - started_s)

    async def _start_exec(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], folder: str, max_bytes: int
    ) -> tuple[Exec, str]:
        run = Exec(max_bytes)
        number = await self._engine.new_exec(self._container, command, env, folder)
        stream = await EngineStream.open(
            self._engine.socket_path,
            f"/exec/{number}/start",
            {"Detach": False, "Tty": False},
            on_data=lambda data: run.keep(0, data),
            on_error=lambda data: run.keep(1, data),
            on_end=run.ended.set,
        )
        stream.write(stdin)
        stream.close_write()
        return run, number

    async def _kill_the_rest(self) -> int:
        """Kill what a program left, and return how many processes ran out of memory since the last call."""
        run, _ = await self._start_exec(["sh", "-c", KILL_THE_REST], b"", self._env, "", 4096)
        try:
            async with asyncio.timeout(CLEAN_UP_TIMEOUT_S):
                await run.ended.wait()
        except TimeoutError:
            await self.close()
            raise SandboxError("the processes of a container could not be killed; it was removed") from None
        words = b"".join(run.output[0]).split()
        counted = int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0
        before, self._num_oom_kills = self._num_oom_kills, counted
        return counted - before


def _result_of(
    run: Exec, code: int | None, verdict: Status | None, oom_kills: int, limits: Limits, wall_s: float
) -> ExecResult:
    """Return the result of an exec; a `code` above 128 means a signal, as in a shell, and None that it was killed."""
    stdout, stderr = (b"".join(chunks) for chunks in run.output)
    code = 128 + signal.SIGKILL if code is None else code
    wait_status = code - 128 if 128 < code <= 128 + signal.NSIG else code << 8
    return result_of(
        Ended(wait_status=wait_status, cpu_s=0.0, peak_memory_bytes=0),
        stdout,
        stderr,
        limits,
        verdict=verdict,
        is_truncated=run.is_cut,
        wall_s=wall_s,
        oom_kills=oom_kills,
    )
