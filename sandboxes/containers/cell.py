"""A container as a cell: programs and files by its agent, over one stream."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

from areal_agent.errors import SandboxError
from sandboxes.archive import Entry, checked, entries_of
from sandboxes.archive import pack as pack_tar
from sandboxes.base import Program
from sandboxes.containers.agent.files import EXECUTABLE, FILE, FOLDER
from sandboxes.containers.agent.wire import Operation, Tell, pack, unpack
from sandboxes.containers.agent_link import CHUNK_BYTES, AgentLink
from sandboxes.containers.bounds import SharedBounds
from sandboxes.containers.confinement import User
from sandboxes.containers.judgement import result_of
from sandboxes.containers.process import ContainerProcess
from sandboxes.containers.request import file_request, folder_of, program_request
from sandboxes.limits import Limits
from sandboxes.paths import relative_parts
from sandboxes.result import ExecResult

OF_THE_CELL = ("disk_bytes", "inodes")
FILES_TIMEOUT_S = 60.0


class AgentCell:
    """`close` of the provider ends the container."""

    def __init__(
        self,
        link: AgentLink,
        bounds: SharedBounds,
        limits: Limits,
        user: User,
        env: Mapping[str, str],
        remove: Callable[[], Awaitable[None]],
    ) -> None:
        self._link = link
        self._bounds = bounds
        self._limits = limits
        self._user = user
        self._env = env
        self._remove = remove

    @property
    def is_alive(self) -> bool:
        return self._link.is_alive

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        self._check_limits(limits)
        request = self._request(program, limits, is_timed=True)
        async with self._bounds.held(limits):
            return await self._run(request, stdin, limits)

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> ContainerProcess:
        self._check_limits(limits)
        request = self._request(program, limits, is_timed=is_timed)
        await self._bounds.hold(limits)
        try:
            process = await ContainerProcess.start(self._link, request, limits, is_timed=is_timed)
        except BaseException:
            self._bounds.release()
            raise
        process.run.ended.add_done_callback(lambda _ended: self._bounds.release())
        return process

    async def read(self, path: str) -> bytes:
        name = "/".join(relative_parts(path))
        max_bytes = self._limits.file_bytes
        return await self._do_files(Operation.READ, [os.fsencode(name), b"%d" % max_bytes], path, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        name = "/".join(relative_parts(path))
        await self._write(b"", [(FILE, os.fsencode(name), data)], path)

    async def upload(self, tar: bytes, path: str) -> None:
        entries = [
            (
                FOLDER if entry.data is None else EXECUTABLE if entry.is_executable else FILE,
                entry.path,
                entry.data or b"",
            )
            for entry in await asyncio.to_thread(entries_of, tar)
        ]
        folder = b"" if folder_of(path) == b"." else folder_of(path)
        await self._write(folder, [(FOLDER, b".", b""), *((k, os.fsencode(n), d) for k, n, d in entries)], path)

    async def download(self, path: str, max_bytes: int) -> bytes:
        arguments = [folder_of(path), b"%d" % max_bytes]
        return await asyncio.to_thread(tar_of, await self._do_files(Operation.LIST, arguments, path, max_bytes))

    async def close(self) -> None:
        await self._link.aclose()
        await self._remove()

    def _check_limits(self, limits: Limits) -> None:
        for name in OF_THE_CELL:
            if getattr(limits, name) not in (None, getattr(self._limits, name)):
                raise ValueError(f"Limits.{name} holds for a whole sandbox; give it in SandboxSpec.limits")

    def _request(self, program: Program, limits: Limits, *, is_timed: bool) -> bytes:
        return program_request(program, {**self._env, **program.env}, self._user, limits, is_timed=is_timed)

    async def _run(self, request: bytes, stdin: bytes, limits: Limits) -> ExecResult:
        output: dict[Tell, list[bytes]] = {Tell.STDOUT: [], Tell.STDERR: []}
        room = limits.output_bytes

        def keep(stream: Tell, data: bytes) -> None:
            nonlocal room
            room -= len(data)
            if room < 0:
                self._link.fail("it sends more output than was asked for")
            output[stream].append(data)

        is_short = len(stdin) <= CHUNK_BYTES
        run = await self._link.start(
            request,
            wall_s=limits.wall_s,
            output_bytes=limits.output_bytes,
            is_paced=False,
            on_output=keep,
            stdin=stdin if is_short else None,
        )
        try:
            if not is_short:
                await self._link.feed(run, stdin)
            end = await run.ended
        finally:
            self._link.kill(run)
        return result_of(end, b"".join(output[Tell.STDOUT]), b"".join(output[Tell.STDERR]), limits)

    async def _write(self, folder: bytes, entries: list[tuple[bytes, bytes, bytes]], path: str) -> None:
        data = pack(*(text for entry in entries for text in entry))
        await self._do_files(Operation.WRITE, [folder], path, 0, data)

    async def _do_files(
        self, operation: Operation, arguments: list[bytes], path: str, max_bytes: int, data: bytes = b""
    ) -> bytes:
        """OSError with the number that is the exit code."""
        slack = 64 * 1024  # of what is packed
        limits = Limits(wall_s=FILES_TIMEOUT_S, output_bytes=max_bytes * 2 + slack)
        async with self._bounds.slot():
            result = await self._run(file_request(operation, self._user, *arguments), data, limits)
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        if not result.is_ok:
            raise OSError(f"the files of this sandbox cannot be reached: {result.status.value}")
        return result.stdout


def tar_of(packed: bytes) -> bytes:
    """The tar of what an agent lists; what is none of it raises SandboxError."""
    try:
        texts = unpack(packed)
        entries = [
            Entry(path=os.fsdecode(name), data=None if kind == FOLDER else data, is_executable=kind == EXECUTABLE)
            for kind, name, data in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
        ]
        return checked(pack_tar(entries))
    except ValueError as error:
        raise SandboxError(f"the container lists no files but {error}") from error
