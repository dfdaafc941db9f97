"""A container with an agent as a cell: the agent handles its files, with the rights of its programs."""

import asyncio
import os
from dataclasses import dataclass

from sandboxes.agent.wire import EXECUTABLE, FILE, FOLDER, Operation, pack, unpack
from sandboxes.base import Archives
from sandboxes.cell import AgentCell, encoded, folder_of, request_of
from sandboxes.folder import Entry, checked, entries_of
from sandboxes.folder import pack as pack_tar
from sandboxes.spec import Limits, relative_parts

UNBOUNDED = 2**63 - 1
MAX_FILE_DESCRIPTORS = 128
FILES_TIMEOUT_S = 60.0
PACKING_BYTES = 64 * 1024


@dataclass(eq=False)
class ContainerCell(AgentCell):
    """A cell whose folder only its agent can reach."""

    archives: Archives | None = None

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

    async def _do_files(self, operation: Operation, name: bytes, path: str, max_bytes: int, data: bytes = b"") -> bytes:
        """Do something with the file or folder `name`; the errno, which the exit code holds, is raised as OSError."""
        bounds = Limits(wall_s=FILES_TIMEOUT_S, open_files=MAX_FILE_DESCRIPTORS, file_bytes=UNBOUNDED)
        home = encoded(self.home)
        request = request_of(operation, self.user, bounds, home, b".", {}, [name, b"%d" % max_bytes], is_timed=False)
        limits = Limits(wall_s=FILES_TIMEOUT_S, output_bytes=max_bytes * 2 + PACKING_BYTES)
        link = await self.reach()
        await link.check_alive()
        async with self.slots():
            result = await self.run(link, request, data, limits)
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        if not result.is_ok:
            raise OSError(f"the files of this sandbox cannot be accessed: {result.status.value}")
        return result.stdout


def file_of(path: str) -> bytes:
    return os.fsencode("/".join(relative_parts(path)))


def tar_of(packed: bytes) -> bytes:
    """Make a tar of what the programs' user lists; OSError when the list is malformed."""
    try:
        texts = unpack(packed)
        entries = [
            Entry(path=os.fsdecode(name), data=None if kind == FOLDER else data, is_executable=kind == EXECUTABLE)
            for kind, name, data in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
        ]
        return checked(pack_tar(entries))
    except ValueError as error:
        raise OSError(f"the files of this sandbox cannot be listed: {error}") from error
