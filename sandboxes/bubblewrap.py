"""The bubblewrap backend: each cell is a jail of namespaces, with a disk in memory, a filter and control groups.

Jails are forked by zygotes, one for each kind of jail; `Zygotes` is the host's end of them. A cell is its jail: closing
it ends everything in it. Where bubblewrap is missing, system calls build the same walls (`inner/enter.py`);
`find_walls` tries which work here. README.md says what each backend stops.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.base import ENFORCED_BY_WALLS, Capabilities
from sandboxes.cgroups import DEFAULT_PIDS, ControlGroup, GroupTree, reap_groups
from sandboxes.folder import OpenFolder
from sandboxes.inner.processes import children_of
from sandboxes.inner.wire import REPORT, ReportKind
from sandboxes.jail import JAIL_UID, Jail, JailKind, Walls, check_workdir
from sandboxes.launched import LaunchedCell
from sandboxes.link import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    ChildProcess,
    LauncherLink,
    LauncherTimeoutError,
    control_sockets,
    start_process,
)
from sandboxes.proxy import FilteringProxy, proxy_environment
from sandboxes.spec import CellSpec, Isolation, Limits

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
GONE = "the jail of this sandbox is gone, and its files with it; acquire another"
MAX_ZYGOTES = 8
"""Each zygote takes some 10 MB. Above this number, the least recently used one ends if none of its jails lives."""
FULL_PAUSE_S = 0.01


class BubblewrapProvider:
    """The provider of jails. Make it with `start`, end it with `close`."""

    def __init__(self, walls: Walls, groups: GroupTree | None) -> None:
        self._walls = walls
        self._groups = groups
        self._zygotes = Zygotes()
        self._cells: set[LaunchedCell] = set()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, candidates: Sequence[Walls] = tuple(Walls)) -> Self:
        """Start the provider; SandboxError where no jail can be built."""
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


async def find_walls(candidates: Sequence[Walls] = tuple(Walls)) -> Walls:
    """Try to build walls and return the first that stand here; SandboxError with every reason if none do."""
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


def capabilities_of(walls: Walls, *, has_groups: bool) -> Capabilities:
    """Return what this backend enforces, with or without control groups."""
    together = "memory and processes of a program together" if has_groups else "address space of each process"
    return Capabilities(
        backend="bubblewrap",
        isolation=Isolation.NAMESPACES,
        enforces=(*ENFORCED_BY_WALLS, "no using the network", f"walls by {walls.value}", together),
        cannot_stop=("attacks on the kernel", *(() if has_groups else ("memory of many processes together",))),
    )


class Zygote:
    """A process that forks jails. Make it with `start`; `aclose` ends it and all its jails."""

    def __init__(self, process: ChildProcess, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._links: set[LauncherLink] = set()
        self._num_forking = 0
        self.is_stuck = False

    @classmethod
    async def start(cls, kind: JailKind) -> Self:
        """Start a zygote; SandboxError where the walls cannot be built."""
        process, control = await start_process(kind.command, socket.SOCK_SEQPACKET)
        zygote = cls(process, control)
        try:
            await asyncio.wait_for(zygote._hello(), START_TIMEOUT_S)
        except BaseException as error:
            await zygote.aclose()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the walls of the jail were not built within {START_TIMEOUT_S:g} s") from None
            raise
        return zygote

    @property
    def is_dead(self) -> bool:
        return self._process.has_ended

    @property
    def has_jails(self) -> bool:
        return self._num_forking > 0 or any(link.is_alive for link in self._links)

    async def fork(self, jail: Jail) -> LauncherLink:
        """Return the launcher of a new jail; SandboxError when it cannot be started."""
        self._num_forking += 1
        try:
            link = await self._fork(jail)
        except LauncherTimeoutError:
            self.is_stuck = True
            raise
        finally:
            self._num_forking -= 1
        self._links = {link, *(link for link in self._links if link.is_alive)}
        return link

    async def _fork(self, jail: Jail) -> LauncherLink:
        ours, theirs = control_sockets(socket.SOCK_STREAM)
        try:
            await self._send(json.dumps(jail.particulars).encode(), theirs.fileno())
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise SandboxError(f"the process that starts jails has died: {error}; try again") from error
            raise
        finally:
            theirs.close()
        return await LauncherLink.follow(ours)

    async def aclose(self) -> None:
        self._control.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            for child in children_of(self._process.pid):  # the first process behind the walls
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._process.kill()
            await self._process.wait()

    async def _hello(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._control, REPORT.size)
        if not data:
            raise SandboxError("the sandbox launcher died before it was ready")
        kind, _, value, _, _ = REPORT.unpack(data)
        if kind == ReportKind.FAILED:
            raise SandboxError(f"the jail could not be built: {os.strerror(value)}")

    async def _send(self, frame: bytes, descriptor: int) -> None:
        while True:
            try:
                socket.send_fds(self._control, [frame], [descriptor])
            except BlockingIOError:  # hundreds of requests wait already
                await asyncio.sleep(FULL_PAUSE_S)
            else:
                return


class Zygotes:
    """A provider's zygotes. Each is started when a jail of its kind is asked for, and again after it has died."""

    def __init__(self) -> None:
        self._usable: dict[JailKind, Zygote] = {}  # least recently used first
        self._stuck: list[Zygote] = []  # they start no more jails, but their jails may live
        self._starting = asyncio.Lock()

    async def fork(self, jail: Jail) -> LauncherLink:
        """Return the launcher of a new jail; SandboxError when it cannot be started."""
        return await (await self._of(jail.kind)).fork(jail)

    async def aclose(self) -> None:
        async with self._starting:
            await asyncio.gather(*(zygote.aclose() for zygote in (*self._usable.values(), *self._stuck)))
            self._usable.clear()
            self._stuck.clear()

    async def _of(self, kind: JailKind) -> Zygote:
        async with self._starting:
            zygote = self._usable.pop(kind, None)
            if zygote is not None and zygote.is_dead:
                await zygote.aclose()
                zygote = None
            elif zygote is not None and zygote.is_stuck:
                self._stuck.append(zygote)
                zygote = None
            self._usable[kind] = zygote or await Zygote.start(kind)
            for other in list(self._usable)[: max(0, len(self._usable) - MAX_ZYGOTES)]:
                if not self._usable[other].has_jails:
                    await self._usable.pop(other).aclose()
            return self._usable[kind]


class JailGround:
    """The ground of one jail: the launcher that is its first process and, if it has a network, its proxy."""

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
        """Return the limits of each process; a control group, if there is one, bounds memory and process count."""
        limits.check_within(self._limits)
        return {
            "cpu_s": limits.max_cpu_s,
            "address_space_bytes": None if has_group else limits.memory_bytes,
            "new_processes": None if has_group else limits.pids or DEFAULT_PIDS,
            "file_bytes": limits.file_bytes,
            "open_files": limits.open_files,
        }

    async def with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        """Act on the working folder through a duplicate descriptor, which a concurrent close cannot pull away."""
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
    """Yield a control group for one program, or None where there are none."""
    if groups is None:
        yield None
        return
    group = await groups.take(limits)
    try:
        yield group
    finally:
        groups.give_back(group)
