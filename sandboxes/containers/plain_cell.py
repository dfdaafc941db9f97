"""The cell of a container whose image has no Python: every program is an exec of the engine's, one at a time."""

import asyncio
import posixpath
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.agent.wire import End
from sandboxes.base import Archives, Process, Program
from sandboxes.cell import result_of
from sandboxes.cgroups import SharedBounds
from sandboxes.containers.cell import FILES_TIMEOUT_S
from sandboxes.containers.engine import Engine, Stream, frames
from sandboxes.link import GONE, Ended
from sandboxes.spec import ExecResult, Limits, folder_parts, relative_parts

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

    async def answers(self) -> bool:
        return self._is_alive()

    def _is_alive(self) -> bool:
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
        if not self._is_alive():
            raise SandboxError(GONE)
        started_s = time.monotonic()
        try:
            number, stream = await self.engine.exec(self.container, command, env, posixpath.join(self.workdir, cwd))
            stdout, stderr, reason = await talk(stream, stdin, limits)
        finally:
            oom_kills = await asyncio.shield(asyncio.ensure_future(self._kill_the_rest()))
        code = await self.engine.exit_code(number)
        code = 128 + signal.SIGKILL if code is None else code  # above 128 it means a signal, as in a shell
        ended = Ended(
            wait_status=code - 128 if 128 < code <= 128 + signal.NSIG else code << 8,
            wall_s=time.monotonic() - started_s,
            oom_kills=oom_kills,
            reason=reason,
            is_cut=reason is End.OUTPUT,
        )
        return result_of(ended, limits, stdout, stderr, has_group=True)

    async def _kill_the_rest(self) -> int:
        """Kill what a program left, and return how many processes ran out of memory since the last call."""
        _, stream = await self.engine.exec(self.container, shell(KILL_THE_REST), self.env, self.workdir)
        stdout, _, reason = await talk(stream, b"", CLEAN_UP)
        if reason is End.DEADLINE:
            await self.close()
            raise SandboxError("the processes of a container could not be killed; it was removed")
        words = stdout.split()
        counted = int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0
        before, self._num_oom_kills = self._num_oom_kills, counted
        return counted - before


def shell(script: str, *arguments: str) -> Sequence[str]:
    """Return the command for a script, which first waits for a line: it comes when the host can hear the script."""
    return ("sh", "-c", f"read -r _ || exit 1; {script}", "sh", *arguments)


async def talk(stream: Stream, stdin: bytes, limits: Limits) -> tuple[bytes, bytes, End]:
    """Talk with an exec until it ends, and return stdout, stderr, and the reason of its end."""
    reader, writer = stream
    stdout, stderr = output = bytearray(), bytearray()
    room, reason = limits.output_bytes, End.ITSELF
    try:
        writer.write(b"\n" + stdin)
        writer.write_eof()
        async with asyncio.timeout(limits.wall_s):
            async for is_error, data in frames(reader):
                output[is_error].extend(data[:room])
                if len(data) > room:
                    reason = End.OUTPUT
                    break
                room -= len(data)
    except TimeoutError:
        reason = End.DEADLINE
    finally:
        writer.transport.abort()
    return bytes(stdout), bytes(stderr), reason
