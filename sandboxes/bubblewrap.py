"""The bubblewrap backend: each cell a jail, with namespaces, a disk in memory, a filter and control groups.

A cell is its jail: closing it ends all that is in it. Without bubblewrap the same walls are built by system calls
(`enter.py`); `find_walls` tells which work here. README.md says what each stops.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.base import Capabilities
from sandboxes.cgroups import DEFAULT_PIDS, ControlGroup
from sandboxes.folder import OpenFolder
from sandboxes.group_tree import GroupTree
from sandboxes.jail import JAIL_UID, Jail, Walls, check_workdir
from sandboxes.launched import LaunchedCell
from sandboxes.limits import Limits
from sandboxes.link import LauncherLink
from sandboxes.proxy import FilteringProxy, proxy_environment
from sandboxes.reap import reap_groups
from sandboxes.spec import CellSpec, Isolation
from sandboxes.zygote import Zygotes

logger = logging.getLogger(__name__)

OF_THE_CELL = ("disk_bytes", "inodes")
GONE = "the jail of this sandbox is gone, and its files with it; acquire another"

Answer = TypeVar("Answer")


async def find_walls(candidates: Sequence[Walls] = tuple(Walls)) -> Walls:
    """The first walls that stand on this machine, by building them; SandboxError with every reason when none does."""
    reasons: list[str] = []
    zygotes = Zygotes()
    for walls in candidates:
        try:
            link = await zygotes.fork(Jail(walls=walls, spec=CellSpec(limits=Limits())))
        except SandboxError as error:
            reasons.append(f"{walls.value}: {error}")
        else:
            await link.aclose()
            return walls
        finally:
            await zygotes.aclose()
    raise SandboxError(
        f"no jail can be built on this machine ({'; '.join(reasons)}); run as root, allow user namespaces "
        "(sysctl user.max_user_namespaces), or use the subprocess backend"
    )


class BubblewrapProvider:
    """Make it with `start`, end it with `close`."""

    def __init__(self, walls: Walls, groups: GroupTree | None) -> None:
        self._walls = walls
        self._groups = groups
        self._zygotes = Zygotes()
        self._cells: set[LaunchedCell] = set()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, candidates: Sequence[Walls] = tuple(Walls)) -> Self:
        """SandboxError where no jail can be built."""
        walls = await find_walls(candidates)
        groups: GroupTree | None = None
        try:
            await asyncio.to_thread(reap_groups)
            groups = await GroupTree.open()
        except (SandboxError, OSError) as error:
            logger.warning("programs are bounded one process at a time, not together: %s", error)
        logger.info("sandboxes are jails built by %s, %s control groups", walls.value, "with" if groups else "without")
        return cls(walls, groups)

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._walls, has_groups=self._groups is not None)

    def check(self, spec: CellSpec) -> None:
        spec.refuse("bubblewrap", "image", "user", "runtime")
        check_workdir(spec.workdir)
        if spec.limits.cpus is not None and self._groups is None:
            raise SandboxError("Limits.cpus needs control groups, and there are none here; leave it out")

    async def create(self, spec: CellSpec) -> LaunchedCell:
        self.check(spec)
        if self._closing is not None:
            raise SandboxError("the sandbox pool is closed; open another")
        ground = await JailGround.start(self._zygotes, Jail(walls=self._walls, spec=spec), self._groups)
        cell = LaunchedCell(ground, spec.limits, self._cells.discard)
        if self._closing is not None:
            await ground.aclose()
            raise SandboxError("the sandbox pool was closed")
        self._cells.add(cell)
        return cell

    async def reap(self) -> int:
        return await asyncio.to_thread(reap_groups)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(cell.close() for cell in self._cells))
        await self._zygotes.aclose()
        if self._groups is not None:
            await self._groups.aclose()


class JailGround:
    """One jail, with a launcher as its first process, and its way to the network, if it has one."""

    def __init__(self, jail: Jail, link: LauncherLink, groups: GroupTree | None, proxy: FilteringProxy | None) -> None:
        self.home = jail.kind.home
        self.env = proxy_environment() if proxy else {}
        self._limits = jail.spec.limits
        self._link = link
        self._groups = groups
        self._proxy = proxy

    @classmethod
    async def start(cls, zygotes: Zygotes, jail: Jail, groups: GroupTree | None) -> Self:
        link = await zygotes.fork(jail)
        try:
            listener = link.take_listener()
            proxy = None
            if listener is not None and jail.spec.network is not None:
                proxy = await FilteringProxy.start(listener, jail.spec.network)
        except BaseException:
            await link.aclose()
            raise
        return cls(jail, link, groups, proxy)

    @property
    def is_alive(self) -> bool:
        return self._link.is_alive

    async def link(self) -> LauncherLink:
        if not self._link.is_alive:
            raise SandboxError(GONE)
        return self._link

    def group(self, limits: Limits) -> AbstractAsyncContextManager[ControlGroup | None]:
        return _group_in(self._groups, limits)

    def limits_of_process(self, limits: Limits, *, has_group: bool) -> dict[str, int | None]:
        """Control groups know better of two of them."""
        for name in OF_THE_CELL:
            if getattr(limits, name) not in (None, getattr(self._limits, name)):
                raise ValueError(f"Limits.{name} holds for a whole sandbox; give it in SandboxSpec.limits")
        return {
            "cpu_s": limits.max_cpu_s,
            "address_space_bytes": None if has_group else limits.memory_bytes,
            "new_processes": None if has_group else limits.pids or DEFAULT_PIDS,
            "file_bytes": limits.file_bytes,
            "open_files": limits.open_files,
        }

    async def with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        """With a descriptor that outlives a close meanwhile."""
        if self._link.folder is None or not self._link.is_alive:
            raise SandboxError(GONE)
        descriptor = os.dup(self._link.folder)
        try:
            return await asyncio.to_thread(act, OpenFolder(descriptor, JAIL_UID if os.getuid() == 0 else None))
        finally:
            os.close(descriptor)

    async def aclose(self) -> None:
        await self._link.aclose()
        if self._proxy is not None:
            await self._proxy.aclose()


@asynccontextmanager
async def _group_in(groups: GroupTree | None, limits: Limits) -> AsyncGenerator[ControlGroup | None, None]:
    """A control group for one program, where there are any."""
    if groups is None:
        yield None
        return
    group = await groups.take(limits)
    try:
        yield group
    finally:
        groups.give_back(group)


def capabilities_of(walls: Walls, *, has_groups: bool) -> Capabilities:
    """What this backend enforces, with or without control groups."""
    enforced = [
        "wall-clock time",
        "CPU time, file length and open files of each process",
        "output",
        "disk and number of files of the sandbox",
        "no reading your files",
        "no using the network",
        "no changing files outside the working directory",
        "no reading the memory and environment of your other processes",
        "no sending signals to your other processes",
        "daemons die with their program",
        f"walls by {walls.value}",
    ]
    together = "memory and processes of a program together"
    enforced.append(together if has_groups else "address space of each process")
    return Capabilities(
        backend="bubblewrap",
        isolation=Isolation.NAMESPACES,
        enforces=tuple(enforced),
        cannot_stop=("attacks on the kernel", *(() if has_groups else ("memory of many processes together",))),
    )
