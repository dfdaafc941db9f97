"""The jail backend: each cell is a jail of namespaces, with a disk in memory, a filter and control groups.

A jail is a container that we build ourselves (`agent/walls.py`), with the same agent in it. A zygote forks them;
`Zygotes` is the host's end. A cell is its jail: closing it ends everything in it. backends.md says what the backend
stops.
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
from functools import partial
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.agent.walls import ANSWER, DEFAULT_WORKDIR, MAX_DESCRIPTORS
from sandboxes.base import ENFORCED_BY_WALLS, Capabilities
from sandboxes.cell import Cells, FolderCell, User, base_environment, fresh_user
from sandboxes.cgroups import NUM_OURS, Bounds, ControlGroup, GroupTree, SharedBounds, disk_of, reap_groups
from sandboxes.link import AgentLink, chunks_of, end_process, socket_pair, start_process
from sandboxes.proxy import connect, proxy_environment
from sandboxes.seccomp import allowing_filter
from sandboxes.spec import CellSpec, Isolation, Limits, Program

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
NO_ROOM = "the jail was given up because this process has too many open files; raise the limit (ulimit -n)"
FULL_PAUSE_S = 0.01
NOBODY = User(uid=65534, gid=65534)
"""The user inside where the host is not root, whose own user it is outside; a host that is root takes a fresh one."""
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = (
    *("/etc/alternatives", "/etc/ld.so.cache"),  # the targets of program names, and the locations of libraries
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/ca-certificates"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICE_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
MAX_WORKDIR = 1024
TAKEN_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "proc", "sys", "tmp")
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
        shared = "memory and processes of all programs of a sandbox together"
        together = shared if has_groups else "address space of each process"
        return Capabilities(
            backend="jail",
            isolation=Isolation.NAMESPACES,
            enforces=(*ENFORCED_BY_WALLS, "no using the network", together),
            cannot_stop=("attacks on the kernel", *(() if has_groups else ("memory of many processes together",))),
        )

    def check(self, spec: CellSpec) -> None:
        spec.refuse("jail", "image", "user", "runtime", "is_writable", "may_trace")
        check_workdir(spec.workdir)
        if spec.limits.cpus is not None and self._groups is None:
            raise SandboxError("Limits.cpus needs control groups, and there are none here; leave it out")

    async def create(self, spec: CellSpec) -> FolderCell:
        self.check(spec)
        self._cells.check_open()
        return await self._cells.add(await start_jail(self._zygotes, spec, self._groups))

    async def reap(self) -> int:
        return await asyncio.to_thread(reap_groups)

    async def close(self) -> None:
        await self._cells.close()

    async def _release(self) -> None:
        await self._zygotes.aclose()
        if self._groups is not None:
            await self._groups.aclose()


async def start_jail(zygotes: "Zygotes", spec: CellSpec, groups: GroupTree | None) -> FolderCell:
    """Return the cell of a new jail; SandboxError when it cannot be started."""
    home, user = spec.workdir or DEFAULT_WORKDIR, fresh_user() if os.getuid() == 0 else NOBODY
    group = None if groups is None else await groups.take(spec.limits)
    env = base_environment(home) | (proxy_environment() if spec.has_network else {})
    parts = contextlib.AsyncExitStack()

    def process_bounds(limits: Limits) -> tuple[int, int]:
        return (0, 0) if group else (limits.memory_bytes, NUM_OURS + Bounds.of(limits).pids)

    try:
        if groups is not None and group is not None:
            parts.callback(groups.drop, group)
        jail = await zygotes.fork(spec, user, group)
        parts.push_async_callback(jail.aclose)
        cell = FolderCell(
            reach=jail.link.itself,
            home=home,
            env=env,
            user=user,
            limits=spec.limits,
            bounds=SharedBounds(Bounds.of(spec.limits), partial(groups.limit, group)) if groups and group else None,
            process_bounds=process_bounds,
            has_users=os.getuid() == 0,
            parts=parts,
            open_folder=jail.open_folder,
        )
        if spec.network is not None and spec.has_network:
            await connect(cell, spec.network)
    except BaseException:
        await asyncio.shield(parts.aclose())
        raise
    return cell


async def try_jail() -> None:
    """Build a jail, run a program and remove it; SandboxError with the reason where one of these fails."""
    zygotes, limits = Zygotes(), Limits()
    try:
        cell = await start_jail(zygotes, CellSpec(limits=limits), None)
        result = await cell.exec(Program(source=TRIAL), stdin=b"", limits=limits)
        await cell.close()
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
    is_taken = not is_plain or names[0] in TAKEN_FOLDERS or Path(sys.base_prefix).is_relative_to(f"/{names[0]}")
    if is_taken or not workdir.isprintable() or len(workdir) > MAX_WORKDIR:
        raise SandboxError(
            f"SandboxSpec.workdir is {workdir!r}; give an absolute path that is not the system's, such as '/app', "
            f"of at most {MAX_WORKDIR} characters"
        )


def zygote_config() -> str:
    """Return what a zygote is told of all its jails; SandboxError where there is no filter for this machine."""
    shown = ["/usr"]
    links = dict(DEVICE_LINKS)
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            links[folder] = os.readlink(folder)
        elif os.path.isdir(folder):
            shown.append(folder)
    shown += filter(os.path.exists, SYSTEM_FILES)
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        shown.append(sys.base_prefix)
    call_filter = allowing_filter(platform.machine()).hex()
    return json.dumps({"uid": NOBODY.uid, "filter": call_filter, "shown": shown, "devices": DEVICES, "links": links})


class Jail:
    """What the host holds of a jail: its agent, its working folder and its relay."""

    def __init__(self, link: AgentLink, descriptors: list[int]) -> None:
        self.link = link
        self._folder, self._relay = descriptors

    async def open_folder(self) -> int:
        await self.link.check_alive()
        return os.dup(self._folder)

    async def aclose(self) -> None:
        """End everything in the jail."""
        await self.link.aclose()
        if self.link.is_given_up:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._relay, signal.SIGKILL)
        os.close(self._folder)
        os.close(self._relay)


class ZygoteDiedError(SandboxError):
    """A zygote died, or the process that it forked, before there was a jail."""


class Zygote:
    """A process that forks jails. Make it with `start`; `aclose` ends it and all its jails."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self.is_stuck = False

    @classmethod
    async def start(cls) -> Self:
        """Start a zygote; SandboxError where the walls cannot be built."""
        zygote = cls(*await start_process("walls", "main", socket.SOCK_SEQPACKET, zygote_config()))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await receive_answer(zygote._control)
        except BaseException as error:
            await zygote.aclose()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the walls of the jail were not built within {START_TIMEOUT_S:g} s") from None
            raise
        return zygote

    @property
    def is_dead(self) -> bool:
        return self._process.returncode is not None

    async def fork(self, spec: CellSpec, user: User = NOBODY, group: ControlGroup | None = None) -> Jail:
        """Return a new jail; SandboxError when it cannot be started."""
        ours, theirs = socket_pair(socket.SOCK_STREAM)
        settings = {
            "disk": disk_of(spec.limits),
            "uid": user.uid,
            "workdir": spec.workdir or DEFAULT_WORKDIR,
        }
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                with theirs:
                    await self._send(json.dumps(settings).encode(), theirs, group)
                descriptors = await receive_answer(ours)
        except BaseException as error:
            ours.close()
            self.is_stuck = self.is_stuck or isinstance(error, (TimeoutError, ZygoteDiedError))
            if isinstance(error, TimeoutError):
                raise SandboxError(f"a jail did not start within {START_TIMEOUT_S:g} s") from None
            raise

        async def has_run_out() -> bool:
            with contextlib.suppress(OSError):
                return group is not None and group.num_oom_kills() > 0
            return False

        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            for descriptor in (ours.detach(), *descriptors):
                os.close(descriptor)
            raise
        jail = Jail(AgentLink(chunks_of(reader), writer, has_run_out), descriptors)
        try:
            await jail.link.boot()
        except BaseException:
            await jail.aclose()
            raise
        return jail

    async def aclose(self) -> None:
        self._control.close()
        await end_process(self._process, STOP_TIMEOUT_S)

    async def _send(self, settings: bytes, stream: socket.socket, group: ControlGroup | None) -> None:
        """Ask for a jail whose end of its stream is `stream`."""
        try:
            with group.descriptors() if group else contextlib.nullcontext([]) as descriptors:
                while True:
                    try:
                        socket.send_fds(self._control, [settings], [stream.fileno(), *descriptors])
                        return
                    except BlockingIOError:  # hundreds of requests wait already
                        await asyncio.sleep(FULL_PAUSE_S)
        except ConnectionError as error:
            raise ZygoteDiedError(f"the process that starts jails has died: {error}") from error
        except OSError as error:
            raise SandboxError(f"a jail could not be asked for: {error}") from error


async def receive_answer(control: socket.socket) -> list[int]:
    """Return the descriptors that come with a good answer; SandboxError with the reason for another."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(control)
    try:
        data, descriptors, flags, _ = socket.recv_fds(control, ANSWER.size, MAX_DESCRIPTORS)
    except ConnectionError:
        data, descriptors, flags = b"", list[int](), 0
    if not data:
        raise ZygoteDiedError("the process that builds jails died")
    (error,) = ANSWER.unpack(data)
    if not error and not flags & socket.MSG_CTRUNC:
        return descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    raise SandboxError(f"the jail could not be built: {os.strerror(error)}" if error else NO_ROOM)


class Zygotes:
    """A provider's zygotes: the last forks jails, and the next is started once it has died or does not answer."""

    def __init__(self) -> None:
        self._zygotes: list[Zygote] = []  # jails of those before the last may still live
        self._starting = asyncio.Lock()

    async def aclose(self) -> None:
        async with self._starting:
            await asyncio.gather(*(zygote.aclose() for zygote in self._zygotes))
            self._zygotes.clear()

    async def fork(self, spec: CellSpec, user: User, group: ControlGroup | None) -> Jail:
        """Return a new jail, of another zygote if the first has died; SandboxError when it cannot be started."""
        try:
            return await (await self._usable()).fork(spec, user, group)
        except ZygoteDiedError:
            return await (await self._usable()).fork(spec, user, group)

    async def _usable(self) -> Zygote:
        async with self._starting:
            if not self._zygotes or self._zygotes[-1].is_dead or self._zygotes[-1].is_stuck:
                self._zygotes.append(await Zygote.start())
            return self._zygotes[-1]
