"""The subprocess backend: programs run as processes of the host's user, with the kernel's limits on each.

It bounds time, memory, files and output and, where Linux has Landlock, what a program may change and signal. It does
not isolate: `capabilities` lists what it cannot stop, and backends.md says why. One agent (`link.py`, `agent/`) without
walls serves all sandboxes of a provider; when it dies, running programs fail and a fresh one is started.

(This is not the standard library's `subprocess`, which nothing here uses: imports in this project are absolute.)
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.agent.files import FOLDER_FLAGS, remove_tree
from sandboxes.base import Capabilities
from sandboxes.cell import Cells, FolderCell, User, base_environment
from sandboxes.link import END_PATIENCE_S, AgentLink, chunks_of, end_process, start_process
from sandboxes.owner import PREFIX, is_abandoned, own_tag
from sandboxes.spec import Access, CellSpec, Isolation, Limits

logger = logging.getLogger(__name__)

PROCESS_HEADROOM = 1024
"""Processes that all programs together may add to those of the user."""
PROCESS_COUNT_AGE_S = 10.0

ENFORCED = ("wall-clock time", "CPU time, address space, file length and open files of each process", "output")
STOPPED_BY_LANDLOCK = {
    "changing files outside the working directory": 1,
    "reading the memory and environment of your other processes": 1,
    "sending signals to your other processes": 6,
}
"""The version of Landlock that each needs."""


class Agent:
    """An agent on this machine, which removes a folder at its end. Make it with `start`, end it with `aclose`."""

    def __init__(self, process: asyncio.subprocess.Process, link: AgentLink) -> None:
        self._process = process
        self.link = link

    @classmethod
    async def start(cls, root: Path) -> Self:
        """Start an agent; SandboxError when it cannot be started."""
        process, control = await start_process("forker", "main_without_walls", socket.SOCK_STREAM, str(root))
        reader, writer = await asyncio.open_connection(sock=control)
        agent = cls(process, AgentLink(chunks_of(reader), writer))
        try:
            await agent.link.boot()
        except BaseException:
            await agent.aclose()
            raise
        return agent

    async def aclose(self) -> None:
        """End the agent and all of its programs."""
        await self.link.aclose()
        await end_process(self._process, END_PATIENCE_S)


class SubprocessProvider:
    """The provider of plain processes. Make it with `start`, end it with `close`."""

    def __init__(self, agent: Agent, root: Path) -> None:
        self._agent = agent
        self._root = root
        self._starting = asyncio.Lock()
        self._num_created = 0
        self._is_closed = False
        self._cells = Cells(self._release)
        self._count_processes = CountOfProcesses()

    @classmethod
    async def start(cls) -> Self:
        """Start the agent and log a warning that lists what the backend cannot stop."""
        root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own_tag()}-"))
        try:
            agent = await Agent.start(root)
        except BaseException:
            remove_tree(root)
            raise
        provider = cls(agent, root)
        logger.warning(
            "the subprocess sandbox backend limits programs but does not isolate them from this machine. It cannot "
            "stop: %s. See sandboxes/backends.md.",
            "; ".join(provider.capabilities().cannot_stop),
        )
        return provider

    def capabilities(self) -> Capabilities:
        version = self._agent.link.landlock_version
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
        spec.refuse("subprocess", "image", "user", "workdir", "runtime", "is_writable", "may_trace")
        if spec.network is not None and spec.network.access is not Access.FULL:
            spec.refuse("subprocess", "network")
        refuse_what_is_not_enforced(spec.limits)

    async def create(self, spec: CellSpec) -> FolderCell:
        self.check(spec)
        self._cells.check_open()
        self._num_created += 1
        folder = self._root / str(self._num_created)

        async def reach() -> AgentLink:
            link = await self._live_link()
            make_folder(folder)
            return link

        async def open_folder() -> int:
            make_folder(folder)
            return os.open(folder, FOLDER_FLAGS)

        cell = FolderCell(
            reach=reach,
            home=str(folder),
            env=base_environment(str(folder)),
            user=User(uid=os.getuid(), gid=os.getgid()),
            limits=spec.limits,
            bounds=None,
            process_bounds=self._process_bounds,
            has_users=False,
            parts=contextlib.AsyncExitStack(),
            open_folder=open_folder,
        )
        cell.parts.push_async_callback(self._remove, cell)
        return await self._cells.add(cell)

    async def reap(self) -> int:
        return await asyncio.to_thread(reap_folders)

    async def close(self) -> None:
        await self._cells.close()

    async def _release(self) -> None:
        async with self._starting:
            self._is_closed = True
            await self._agent.aclose()
        await asyncio.to_thread(remove_tree, self._root)

    async def _live_link(self) -> AgentLink:
        """Return the agent's link, a fresh agent's if the last has died."""
        async with self._starting:
            if not self._is_closed and not self._agent.link.is_alive:
                await self._agent.aclose()
                self._agent = await Agent.start(self._root)
            return self._agent.link

    def _process_bounds(self, limits: Limits) -> tuple[int, int]:
        refuse_what_is_not_enforced(limits)
        num_processes = self._count_processes()
        return limits.memory_bytes, num_processes + PROCESS_HEADROOM if num_processes else 0

    async def _remove(self, cell: FolderCell) -> None:
        """End the programs of a cell, and remove its folder."""
        for run in tuple(cell.runs):
            self._agent.link.kill(run)
        if cell.runs:
            await asyncio.wait([run.ended for run in cell.runs])
        try:
            await asyncio.to_thread(remove_tree, cell.home)
        except OSError as error:  # a process that could not be stopped may still write there; the provider tries again
            logger.warning("the files of a sandbox were not removed: %s", error)


def make_folder(folder: Path) -> None:
    """Make the private folder of a sandbox, whenever it is not there: a program may have removed it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


class CountOfProcesses:
    """The number of processes and threads of this user, as RLIMIT_NPROC counts them, looked up now and then.

    It is 0 where it is not needed or not known: the kernel does not limit root's, and macOS has no /proc.
    """

    def __init__(self) -> None:
        self._number = 0
        self._counted_s = float("-inf")

    def __call__(self) -> int:
        now_s = time.monotonic()
        if sys.platform == "linux" and os.getuid() != 0 and now_s - self._counted_s > PROCESS_COUNT_AGE_S:
            self._counted_s, self._number = now_s, 0
            for entry in os.scandir("/proc"):
                with contextlib.suppress(OSError):  # it may end while we look
                    if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                        self._number += len(os.listdir(f"{entry.path}/task"))
        return self._number


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
