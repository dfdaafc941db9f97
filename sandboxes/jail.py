"""The jail backend: each cell is a jail of namespaces, with a disk in memory, a filter and control groups.

Jails are forked by zygotes (`inner/walls.py`), one for each kind of jail; `Zygotes` is the host's end of them. A cell
is its jail: closing it ends everything in it. README.md says what the backend stops.
"""

import asyncio
import contextlib
import json
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.base import ENFORCED_BY_WALLS, Capabilities, Program
from sandboxes.cgroups import DEFAULT_PIDS, ControlGroup, GroupTree, reap_groups
from sandboxes.execution import base_environment
from sandboxes.folder import OpenFolder
from sandboxes.inner.processes import children_of
from sandboxes.inner.wire import REPORT, ReportKind
from sandboxes.launched import Cells, LaunchedCell
from sandboxes.link import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    LauncherLink,
    LauncherTimeoutError,
    control_sockets,
    start_process,
)
from sandboxes.proxy import PROXY_PORT, FilteringProxy, proxy_environment
from sandboxes.seccomp import denying_filter
from sandboxes.spec import Access, CellSpec, Isolation, Limits

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
GONE = "the jail of this sandbox is gone, and its files with it; acquire another"
MAX_ZYGOTES = 8
"""Each zygote takes some 10 MB. Above this number, the least recently used one ends if none of its jails lives."""
FULL_PAUSE_S = 0.01
JAIL_UID = 65534
"""The user inside is `nobody`. Outside it is the same user if the host runs as root, else the host's own user."""
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache")  # the targets of program names, and the locations of libraries
CERTIFICATES = ("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/ca-certificates")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICE_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
DEFAULT_WORKDIR = "/work"
TAKEN_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "proc", "sys", "tmp")
DEFAULT_DISK_BYTES = 64 * 2**20
DEFAULT_INODES = 10_000
TRIAL = "import colorsys; open('/dev/null', 'w').close(); open('file', 'w').close()"


class JailProvider:
    """The provider of jails. Make it with `start`, end it with `close`."""

    def __init__(self, groups: GroupTree | None) -> None:
        self._groups = groups
        self._zygotes = Zygotes()
        self._cells = Cells(self._release)

    @classmethod
    async def start(cls) -> Self:
        """Start the provider; SandboxError where no jail can be built."""
        await try_jail()
        groups: GroupTree | None = None
        try:
            await asyncio.to_thread(reap_groups)
            groups = await GroupTree.open()
        except (SandboxError, OSError) as error:
            logger.warning("programs are bounded one process at a time, not together: %s", error)
        logger.info("sandboxes are jails, %s control groups", "with" if groups else "without")
        return cls(groups)

    def capabilities(self) -> Capabilities:
        has_groups = self._groups is not None
        together = "memory and processes of a program together" if has_groups else "address space of each process"
        return Capabilities(
            backend="jail",
            isolation=Isolation.NAMESPACES,
            enforces=(*ENFORCED_BY_WALLS, "no using the network", together),
            cannot_stop=("attacks on the kernel", *(() if has_groups else ("memory of many processes together",))),
        )

    def check(self, spec: CellSpec) -> None:
        spec.refuse("jail", "image", "user", "runtime", "is_writable")
        check_workdir(spec.workdir)
        if spec.limits.cpus is not None and self._groups is None:
            raise SandboxError("Limits.cpus needs control groups, and there are none here; leave it out")

    async def create(self, spec: CellSpec) -> LaunchedCell:
        self.check(spec)
        self._cells.check_open()
        return await self._cells.add(await JailGround.start(self._zygotes, spec, self._groups), spec.limits)

    async def reap(self) -> int:
        return await asyncio.to_thread(reap_groups)

    async def close(self) -> None:
        await self._cells.close()

    async def _release(self) -> None:
        await self._zygotes.aclose()
        if self._groups is not None:
            await self._groups.aclose()


async def try_jail() -> None:
    """Build a jail, run a program and remove it; SandboxError with the reason where one of these fails."""
    zygotes, limits = Zygotes(), Limits()
    try:
        async with contextlib.aclosing(await JailGround.start(zygotes, CellSpec(limits=limits), None)) as ground:
            cell = LaunchedCell(ground, limits, lambda _: None)
            result = await cell.exec(Program(source=TRIAL), stdin=b"", limits=limits)
        if not result.is_ok:
            raise SandboxError(f"programs fail in it: {result.status.value} {result.stderr[-200:]!r}")
    except SandboxError as error:
        raise SandboxError(
            f"no jail can be built on this machine ({error}); run as root, allow user namespaces "
            "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), "
            "or use the subprocess backend"
        ) from error
    finally:
        await zygotes.aclose()


def check_workdir(workdir: str | None) -> None:
    """Raise SandboxError for a folder that cannot be a jail's working directory."""
    if workdir is None:
        return
    names = workdir.split("/")[1:]
    is_plain = workdir.startswith("/") and all(name and name not in (".", "..") and "\0" not in name for name in names)
    if not is_plain or names[0] in TAKEN_FOLDERS or Path(sys.base_prefix).is_relative_to(f"/{names[0]}"):
        raise SandboxError(
            f"SandboxSpec.workdir is {workdir!r}; give an absolute path that is not the system's, such as '/app'"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JailKind:
    """The settings that the jails of one zygote share; `home` is the working directory."""

    home: str
    has_proxy: bool

    @classmethod
    def of(cls, spec: CellSpec) -> Self:
        has_proxy = spec.network is not None and spec.network.access is not Access.NONE
        return cls(home=spec.workdir or DEFAULT_WORKDIR, has_proxy=has_proxy)

    def config(self) -> str:
        """Return what the zygote is told of all its jails; SandboxError where there is no filter for this machine."""
        shown = ["/usr"]
        links = dict(DEVICE_LINKS)
        for folder in SYSTEM_FOLDERS:
            if os.path.islink(folder):
                links[folder] = os.readlink(folder)
            elif os.path.isdir(folder):
                shown.append(folder)
        files = (*SYSTEM_FILES, *CERTIFICATES) if self.has_proxy else SYSTEM_FILES
        shown += filter(os.path.exists, files)
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            shown.append(sys.base_prefix)
        config = {
            "uid": JAIL_UID,
            "filter": denying_filter(platform.machine()).hex(),
            "shown": shown,
            "devices": DEVICES,
            "links": links,
            "workdir": self.home,
            "env": {**base_environment(self.home), **(proxy_environment() if self.has_proxy else {})},
            "proxy_port": PROXY_PORT if self.has_proxy else None,
        }
        return json.dumps(config)


class Zygote:
    """A process that forks jails. Make it with `start`; `aclose` ends it and all its jails."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._links: set[LauncherLink] = set()
        self._num_forking = 0
        self.is_stuck = False

    @classmethod
    async def start(cls, kind: JailKind) -> Self:
        """Start a zygote; SandboxError where the walls cannot be built."""
        zygote = cls(*await start_process("walls", socket.SOCK_SEQPACKET, kind.config()))
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
        return self._process.returncode is not None

    @property
    def has_jails(self) -> bool:
        return self._num_forking > 0 or any(link.is_alive for link in self._links)

    async def fork(self, limits: Limits) -> LauncherLink:
        """Return the launcher of a new jail; SandboxError when it cannot be started."""
        ours, theirs = control_sockets(socket.SOCK_STREAM)
        frame = {"disk_bytes": limits.disk_bytes or DEFAULT_DISK_BYTES, "inodes": limits.inodes or DEFAULT_INODES}
        self._num_forking += 1
        try:
            await self._send(json.dumps(frame).encode(), ours, theirs)
            link = await LauncherLink.follow(ours)
        except LauncherTimeoutError:
            self.is_stuck = True
            raise
        finally:
            self._num_forking -= 1
        self._links = {link, *(link for link in self._links if link.is_alive)}
        return link

    async def aclose(self) -> None:
        self._control.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            for child in children_of(self._process.pid):  # the first process behind the walls
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _hello(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._control, REPORT.size)
        if not data:
            raise SandboxError("the sandbox launcher died before it was ready")
        kind, _, value, _, _ = REPORT.unpack(data)
        if kind == ReportKind.FAILED:
            raise SandboxError(f"the jail could not be built: {os.strerror(value)}")

    async def _send(self, frame: bytes, ours: socket.socket, theirs: socket.socket) -> None:
        """Ask for a jail whose control socket is `theirs`, which is closed here; `ours` too if this fails."""
        try:
            with theirs:
                while True:
                    try:
                        socket.send_fds(self._control, [frame], [theirs.fileno()])
                        return
                    except BlockingIOError:  # hundreds of requests wait already
                        await asyncio.sleep(FULL_PAUSE_S)
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise SandboxError(f"the process that starts jails has died: {error}; try again") from error
            raise


class Zygotes:
    """A provider's zygotes. Each is started when a jail of its kind is asked for, and again after it has died."""

    def __init__(self) -> None:
        self._usable: dict[JailKind, Zygote] = {}  # least recently used first
        self._stuck: list[Zygote] = []  # they start no more jails, but their jails may live
        self._starting = asyncio.Lock()

    async def fork(self, spec: CellSpec) -> LauncherLink:
        """Return the launcher of a new jail; SandboxError when it cannot be started."""
        return await (await self._of(JailKind.of(spec))).fork(spec.limits)

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

    def __init__(self, spec: CellSpec, link: LauncherLink, groups: GroupTree | None) -> None:
        self.home = JailKind.of(spec).home
        self.env: dict[str, str] = {}
        self._limits = spec.limits
        self._link = link
        self._groups = groups
        self._proxy: FilteringProxy | None = None

    @classmethod
    async def start(cls, zygotes: Zygotes, spec: CellSpec, groups: GroupTree | None) -> Self:
        ground = cls(spec, await zygotes.fork(spec), groups)
        listener = ground._link.take_listener()
        if listener is not None and spec.network is not None:
            try:
                ground._proxy = await FilteringProxy.start(listener, spec.network)
            except BaseException:
                await ground.aclose()
                raise
            ground.env = proxy_environment()
        return ground

    @property
    def is_alive(self) -> bool:
        return self._link.is_alive

    async def link(self) -> LauncherLink:
        if not self._link.is_alive:
            raise SandboxError(GONE)
        return self._link

    def group(self, limits: Limits) -> AbstractAsyncContextManager[ControlGroup | None]:
        return nullcontext() if self._groups is None else self._groups.one(limits)

    def limits_of_process(self, limits: Limits, *, has_group: bool) -> dict[str, int | None]:
        """Return the limits of each process; a control group, if there is one, bounds memory and process count."""
        limits.check_within(self._limits)
        return {
            "address_space_bytes": None if has_group else limits.memory_bytes,
            "new_processes": None if has_group else limits.pids or DEFAULT_PIDS,
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
