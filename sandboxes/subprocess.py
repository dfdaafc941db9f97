"""The subprocess backend: programs run as processes of the host's user, with the kernel's limits on each.

It bounds time, memory, files and output and, where Linux has Landlock, what a program may change and signal. It does
not isolate: `capabilities` lists what it cannot stop, and README.md says why. One launcher process (`link.py`,
`inner/`) serves all sandboxes of a provider; when it dies, running programs fail and a fresh one is started.

(This is not the standard library's `subprocess`, which nothing here uses: imports in this project are absolute.)
"""

import asyncio
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.base import Capabilities
from sandboxes.folder import OpenFolder
from sandboxes.inner.files import FOLDER_FLAGS, remove_tree
from sandboxes.launched import Cells, LaunchedCell
from sandboxes.link import LauncherLink
from sandboxes.owner import PREFIX, is_abandoned, own_tag
from sandboxes.spec import Access, CellSpec, Isolation, Limits

logger = logging.getLogger(__name__)

PROCESS_HEADROOM = 1024
"""Processes that all programs together may add to those of the user."""

ENFORCED = ("wall-clock time", "CPU time, address space, file length and open files of each process", "output")
STOPPED_BY_LANDLOCK = {
    "changing files outside the working directory": 1,
    "reading the memory and environment of your other processes": 1,
    "sending signals to your other processes": 6,
}
"""The version of Landlock that each needs."""
Answer = TypeVar("Answer")


class SubprocessProvider:
    """The provider of plain processes. Make it with `start`, end it with `close`."""

    def __init__(self, link: LauncherLink, root: Path) -> None:
        self._link = link
        self._root = root
        self._starting = asyncio.Lock()
        self._num_created = 0
        self._is_closed = False
        self._cells = Cells(self._release)

    @classmethod
    async def start(cls) -> Self:
        """Start the launcher and log a warning that lists what the backend cannot stop."""
        root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own_tag()}-"))
        try:
            link = await LauncherLink.start(root)
        except BaseException:
            remove_tree(root)
            raise
        provider = cls(link, root)
        logger.warning(
            "the subprocess sandbox backend limits programs but does not isolate them from this machine. It cannot "
            "stop: %s. See sandboxes/README.md.",
            "; ".join(provider.capabilities().cannot_stop),
        )
        return provider

    def capabilities(self) -> Capabilities:
        version = self._link.landlock_version
        is_linux = sys.platform == "linux"
        stopped = tuple(f"no {act}" for act, needed in STOPPED_BY_LANDLOCK.items() if version >= needed)
        return Capabilities(
            backend="subprocess",
            isolation=Isolation.PROCESS,
            enforces=(*ENFORCED, *stopped, *(("daemons die with their program",) if is_linux else ())),
            cannot_stop=(
                *("reading your files", "using the network"),
                "spreading memory, disk and processes over many small parts",
                *(act for act, needed in STOPPED_BY_LANDLOCK.items() if version < needed),
                *(() if is_linux else ("leaving daemons behind",)),
            ),
        )

    def check(self, spec: CellSpec) -> None:
        spec.refuse("subprocess", "image", "user", "workdir", "runtime", "is_writable")
        if spec.network is not None and spec.network.access is not Access.FULL:
            spec.refuse("subprocess", "network")
        refuse_what_is_not_enforced(spec.limits)

    async def create(self, spec: CellSpec) -> LaunchedCell:
        self.check(spec)
        self._cells.check_open()
        self._num_created += 1
        return await self._cells.add(SharedGround(self, self._root / str(self._num_created)), spec.limits)

    async def reap(self) -> int:
        return await asyncio.to_thread(reap_folders)

    async def close(self) -> None:
        await self._cells.close()

    async def _release(self) -> None:
        async with self._starting:
            self._is_closed = True
            await self._link.aclose()
        await asyncio.to_thread(remove_tree, self._root)

    async def live_link(self) -> LauncherLink:
        """Return the launcher, a fresh one if the last has died. For this backend's cells."""
        async with self._starting:
            if not self._is_closed and not self._link.is_alive:
                await self._link.aclose()
                self._link = await LauncherLink.start(self._root)
            return self._link


class SharedGround:
    """A ground with its own folder on the host's file system and the launcher that all cells share."""

    def __init__(self, provider: SubprocessProvider, folder: Path) -> None:
        self.home = str(folder)
        self.env: dict[str, str] = {}
        self.is_alive = True  # a launcher that has died is replaced
        self._provider = provider
        self._folder = folder
        self._is_made = False

    async def link(self) -> LauncherLink:
        link = await self._provider.live_link()
        self._make()
        return link

    def group(self, limits: Limits) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def limits_of_process(self, limits: Limits, *, has_group: bool) -> dict[str, int | None]:
        refuse_what_is_not_enforced(limits)
        return {"address_space_bytes": limits.memory_bytes, "new_processes": PROCESS_HEADROOM}

    async def with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        def act_on_it() -> Answer:
            top = os.open(self._folder, FOLDER_FLAGS)
            try:
                return act(OpenFolder(top))
            finally:
                os.close(top)

        self._make()
        return await asyncio.to_thread(act_on_it)

    async def aclose(self) -> None:
        try:
            await asyncio.to_thread(remove_tree, self._folder)
        except OSError as error:  # a process that could not be stopped may still write there; the provider tries again
            logger.warning("the files of a sandbox were not removed: %s", error)

    def _make(self) -> None:
        """Make the private folder when it is first needed."""
        if not self._is_made:
            self._folder.mkdir(mode=0o700)
            self._is_made = True


def refuse_what_is_not_enforced(limits: Limits) -> None:
    """Raise SandboxError if a limit is asked for that this backend could only ignore."""
    for name in ("cpus", "pids", "disk_bytes", "inodes"):
        if (value := getattr(limits, name)) is not None:
            raise SandboxError(
                f"Limits.{name} is {value!r}, and the subprocess backend cannot enforce it; leave it out"
            )


def reap_folders() -> int:
    """Remove the working folders of dead processes."""
    abandoned = [
        folder
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
        if is_abandoned(folder.name.removeprefix(PREFIX).partition("-")[0])
    ]
    for folder in abandoned:
        try:
            status = os.lstat(folder)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():  # anybody may put things in /tmp
                remove_tree(folder)
        except OSError as error:
            logger.warning("the files of a dead process were not removed: %s", error)
    return sum(not os.path.lexists(folder) for folder in abandoned)
