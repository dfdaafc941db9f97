"""The bubblewrap backend: each sandbox a jail, with namespaces, a disk in memory, a filter and control groups.

A sandbox starts its jail when it is first used and ends it, with all that is in it, when it is closed. Without
bubblewrap the same walls are built by system calls (`enter.py`); `find_walls` tells which work here. README.md says
what each stops.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.base import Capabilities
from sandboxes.cgroups import DEFAULT_PIDS, ControlGroup, GroupTree, remove_abandoned
from sandboxes.execution import Execution, program_of
from sandboxes.folder import OpenFolder
from sandboxes.jail import JAIL_UID, Jail, Walls
from sandboxes.limits import Limits
from sandboxes.link import LauncherLink
from sandboxes.result import ExecResult
from sandboxes.spec import Isolation, SandboxSpec

logger = logging.getLogger(__name__)

PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"
HOME = "/work"
OF_THE_SANDBOX = ("disk_bytes", "inodes")

Answer = TypeVar("Answer")


async def find_walls(candidates: Sequence[Walls] = tuple(Walls)) -> Walls:
    """The first walls that stand on this machine, by building them; SandboxError with every reason when none does."""
    reasons: list[str] = []
    for walls in candidates:
        try:
            link = await LauncherLink.start(Jail(walls=walls, limits=Limits()).command, shares_pids=False)
        except SandboxError as error:
            reasons.append(f"{walls.value}: {error}")
        else:
            await link.aclose()
            return walls
    raise SandboxError(
        f"no jail can be built on this machine ({'; '.join(reasons)}); run as root, allow user namespaces "
        "(sysctl user.max_user_namespaces), or use the subprocess backend"
    )


class BubblewrapProvider:
    """Make it with `start`, end it with `close`."""

    def __init__(self, walls: Walls, limits: Limits, groups: GroupTree | None) -> None:
        self._walls = walls
        self._limits = limits
        self._groups = groups
        self._sandboxes: set[JailedSandbox] = set()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, limits: Limits, candidates: Sequence[Walls] = tuple(Walls)) -> Self:
        """`limits` are those of a spec that names none. SandboxError where no jail can be built."""
        walls = await find_walls(candidates)
        groups: GroupTree | None = None
        try:
            await asyncio.to_thread(remove_abandoned)
            groups = await GroupTree.open()
        except (SandboxError, OSError) as error:
            logger.warning("programs are bounded one process at a time, not together: %s", error)
        logger.info("sandboxes are jails built by %s, %s control groups", walls.value, "with" if groups else "without")
        return cls(walls, limits, groups)

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._walls, has_groups=self._groups is not None)

    async def create(self, spec: SandboxSpec) -> "JailedSandbox":
        if self._closing is not None:
            raise SandboxError("the sandbox pool is closed; open another")
        if not Isolation.NAMESPACES.covers(spec.min_isolation):
            raise SandboxError(
                f"min_isolation is {spec.min_isolation.value!r}, the bubblewrap backend gives only 'namespaces'; "
                "use a stronger backend, or ask for less"
            )
        limits = spec.limits or self._limits
        if limits.cpus is not None and self._groups is None:
            raise SandboxError("Limits.cpus needs control groups, and there are none here; leave it out")
        sandbox = JailedSandbox(self, Jail(walls=self._walls, limits=limits), spec)
        self._sandboxes.add(sandbox)
        try:
            for path, data in spec.files.items():
                await sandbox.write(path, data)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in self._sandboxes))
        if self._groups is not None:
            await self._groups.aclose()

    @asynccontextmanager
    async def group_of(self, limits: Limits) -> AsyncGenerator[ControlGroup | None, None]:
        """A control group for one program, where there are any. For this backend's sandboxes."""
        if self._groups is None:
            yield None
            return
        group = self._groups.new(limits)
        try:
            yield group
        finally:
            self._groups.release(group)

    def forget(self, sandbox: "JailedSandbox") -> None:
        """A sandbox has closed."""
        self._sandboxes.discard(sandbox)


class JailedSandbox:
    """A jail with a launcher as its first process, and the programs that run in it."""

    def __init__(self, provider: BubblewrapProvider, jail: Jail, spec: SandboxSpec) -> None:
        self._provider = provider
        self._jail = jail
        self._env = {"PATH": PROGRAM_PATH, "HOME": HOME, "TMPDIR": HOME, **spec.env}
        self._starting = asyncio.Lock()
        self._link: LauncherLink | None = None
        self._executions: set[Execution] = set()
        self._closing: asyncio.Task[None] | None = None

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        return await self._run(program_of(argv, cwd, {**self._env, **(env or {})}), stdin, limits)

    async def exec_python(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        program = {"argv": None, "source": source, "cwd": ".", "env": self._env}
        return await self._run(program, stdin, limits)

    async def read(self, path: str) -> bytes:
        return await self._with_folder(lambda folder: folder.read(path, self._jail.limits.file_bytes))

    async def write(self, path: str, data: bytes) -> None:
        await self._with_folder(lambda folder: folder.write(path, data))

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _run(self, program: Mapping[str, Any], stdin: bytes, limits: Limits | None) -> ExecResult:
        limits = limits or self._jail.limits
        self._check_limits(limits)
        link = await self._live_link()
        async with self._provider.group_of(limits) as group:
            self._check_open()
            request = {"folder": HOME, **program, **limits_of_process(limits, has_group=group is not None)}
            execution = Execution(link, limits, group)
            self._executions.add(execution)
            try:
                result = await execution.run(json.dumps(request).encode(), stdin)
            finally:
                if not execution.is_running:
                    self._executions.discard(execution)  # a cancelled one is still dying: `close` waits for it
        self._check_open()
        return result

    def _check_limits(self, limits: Limits) -> None:
        for name in OF_THE_SANDBOX:
            if getattr(limits, name) not in (None, getattr(self._jail.limits, name)):
                raise ValueError(f"Limits.{name} holds for a whole sandbox; give it in SandboxSpec.limits")

    async def _with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        """Do something with the files, in a thread, with a descriptor that outlives a close meanwhile."""
        link = await self._live_link()
        self._check_open()
        if link.folder is None:
            raise SandboxError("the jail of this sandbox is gone, and its files with it; acquire another")
        descriptor = os.dup(link.folder)
        try:
            return await asyncio.to_thread(act, OpenFolder(descriptor, JAIL_UID if os.getuid() == 0 else None))
        finally:
            os.close(descriptor)

    async def _live_link(self) -> LauncherLink:
        async with self._starting:
            self._check_open()
            if self._link is None:
                self._link = await LauncherLink.start(self._jail.command, shares_pids=False)
            if not self._link.is_alive:
                raise SandboxError("the jail of this sandbox is gone, and its files with it; acquire another")
            return self._link

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox is closed; acquire another")

    async def _close(self) -> None:
        await asyncio.gather(*(execution.kill() for execution in self._executions))
        async with self._starting:
            if self._link is not None:
                await self._link.aclose()
        self._provider.forget(self)


def limits_of_process(limits: Limits, *, has_group: bool) -> dict[str, int | None]:
    """The part of the limits that the launcher asks of the kernel; control groups know better of two of them."""
    return {
        "cpu_s": limits.max_cpu_s,
        "address_space_bytes": None if has_group else limits.memory_bytes,
        "new_processes": None if has_group else limits.pids or DEFAULT_PIDS,
        "file_bytes": limits.file_bytes,
        "open_files": limits.open_files,
    }


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
