"""The subprocess backend: programs as processes of the host's user, with the kernel's limits on each.

It bounds time, memory, files and output, and, where Linux has Landlock, what a program may change and signal. It does
not isolate: `capabilities` publishes what it cannot stop, README.md why. One launcher process (`link.py`,
`launcher.py`) serves all sandboxes of a provider; when it dies, running programs fail and the next gets a fresh one.

(Not the standard library's `subprocess`, which nothing here uses: imports in this project are absolute.)
"""

import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from areal_agent.errors import SandboxError
from sandboxes.base import Capabilities
from sandboxes.execution import Execution, program_of
from sandboxes.folder import WorkingFolder, remove_tree
from sandboxes.limits import Limits
from sandboxes.link import LauncherLink
from sandboxes.owner import FOLDER_PREFIX, own_tag
from sandboxes.result import ExecResult
from sandboxes.spec import Isolation, SandboxSpec

logger = logging.getLogger(__name__)

PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"
LAUNCHER = Path(__file__).with_name("launcher.py")  # run by its path: it must not import its package
PROCESS_HEADROOM = 1024
"""Processes that programs may add to those of the user, all programs together."""


class SubprocessProvider:
    """Make it with `start`, end it with `close`."""

    def __init__(self, link: LauncherLink, root: Path, limits: Limits) -> None:
        self._link = link
        self._root = root
        self._limits = limits
        self._starting = asyncio.Lock()
        self._sandboxes: set[SubprocessSandbox] = set()
        self._num_created = 0
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, limits: Limits) -> Self:
        """Start the launcher and say loudly what it cannot stop; `limits` are those of a spec that names none."""
        root = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{own_tag()}-"))
        try:
            link = await start_launcher(root)
        except BaseException:
            remove_tree(root)
            raise
        provider = cls(link, root, limits)
        logger.warning(
            "the subprocess sandbox backend limits programs but does not isolate them from this machine. It cannot "
            "stop: %s. See sandboxes/README.md.",
            "; ".join(provider.capabilities().cannot_stop),
        )
        return provider

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._link.landlock_version)

    async def create(self, spec: SandboxSpec) -> "SubprocessSandbox":
        if self._closing is not None:
            raise SandboxError("the sandbox pool is closed; open another")
        if not Isolation.PROCESS.covers(spec.min_isolation):
            raise SandboxError(
                f"min_isolation is {spec.min_isolation.value!r}, the subprocess backend gives only 'process'; "
                "use a stronger backend, or ask for less"
            )
        if spec.limits is not None:
            refuse_what_is_not_enforced(spec.limits)
        self._num_created += 1
        sandbox = SubprocessSandbox(self, WorkingFolder(self._root / str(self._num_created)), spec, self._limits)
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
        async with self._starting:
            await self._link.aclose()
        await asyncio.to_thread(remove_tree, self._root)

    async def live_link(self) -> LauncherLink:
        """The launcher, a fresh one when the last has died. For this backend's sandboxes."""
        async with self._starting:
            if self._closing is None and not self._link.is_alive:
                await self._link.aclose()
                self._link = await start_launcher(self._root)
            return self._link

    def forget(self, sandbox: "SubprocessSandbox") -> None:
        """A sandbox has closed."""
        self._sandboxes.discard(sandbox)


class SubprocessSandbox:
    """A working directory, and the programs that run in it."""

    def __init__(self, provider: SubprocessProvider, folder: WorkingFolder, spec: SandboxSpec, limits: Limits) -> None:
        self._provider = provider
        self._folder = folder
        self._limits = spec.limits or limits
        self._env = {"PATH": PROGRAM_PATH, "HOME": str(folder.path), "TMPDIR": str(folder.path), **spec.env}
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
        return await self._run(program_of(argv, cwd, {**self._env, **(env or {})}), stdin, limits or self._limits)

    async def exec_python(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        program = {"argv": None, "source": source, "cwd": ".", "env": self._env}
        return await self._run(program, stdin, limits or self._limits)

    async def read(self, path: str) -> bytes:
        self._check_open()
        return await asyncio.to_thread(self._folder.read, path, self._limits.file_bytes)

    async def write(self, path: str, data: bytes) -> None:
        self._check_open()
        await asyncio.to_thread(self._folder.write, path, data)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _run(self, program: Mapping[str, Any], stdin: bytes, limits: Limits) -> ExecResult:
        refuse_what_is_not_enforced(limits)
        link = await self._provider.live_link()
        self._check_open()
        self._folder.make()
        request = {"folder": str(self._folder.path), **program, **limits_of_process(limits)}
        execution = Execution(link, limits)
        self._executions.add(execution)
        try:
            result = await execution.run(json.dumps(request).encode(), stdin)
        finally:
            if not execution.is_running:
                self._executions.discard(execution)  # a cancelled one is still dying: `close` waits for it
        self._check_open()
        return result

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox is closed; acquire another")

    async def _close(self) -> None:
        await asyncio.gather(*(execution.kill() for execution in self._executions))
        try:
            if not self._folder.remove_if_empty():
                await asyncio.to_thread(self._folder.remove)
        except OSError as error:  # a process that could not be stopped may still write there; the provider tries again
            logger.warning("the files of a sandbox were not removed: %s", error)
        self._provider.forget(self)


async def start_launcher(root: Path) -> LauncherLink:
    """A launcher whose last act is to remove `root`."""
    python = [sys.executable, "-I", "-S", "-X", "utf8", str(LAUNCHER)]
    return await LauncherLink.start(lambda control: [*python, str(control), str(root)], shares_pids=True)


def refuse_what_is_not_enforced(limits: Limits) -> None:
    """ValueError for a limit that was asked for and that this backend could only ignore."""
    for name in ("cpus", "pids", "disk_bytes", "inodes"):
        if (value := getattr(limits, name)) is not None:
            raise ValueError(f"Limits.{name} is {value!r}, and the subprocess backend cannot enforce it; leave it out")


def limits_of_process(limits: Limits) -> dict[str, int]:
    """The part of the limits that the launcher asks of the kernel."""
    return {
        "cpu_s": limits.max_cpu_s,
        "address_space_bytes": limits.memory_bytes,
        "new_processes": PROCESS_HEADROOM,
        "file_bytes": limits.file_bytes,
        "open_files": limits.open_files,
    }


def capabilities_of(landlock_version: int) -> Capabilities:
    """What this backend enforces, given the version of Landlock (0: none) that the launcher found."""
    enforced = ["wall-clock time", "CPU time, address space, file length and open files of each process", "output"]
    not_stopped = [
        "reading your files",
        "using the network",
        "spreading memory, disk and processes over many small parts",
    ]
    by_landlock = {
        "changing files outside the working directory": 1,
        "reading the memory and environment of your other processes": 1,
        "sending signals to your other processes": 6,
    }
    for act, version in by_landlock.items():
        if landlock_version >= version:
            enforced.append(f"no {act}")
        else:
            not_stopped.append(act)
    if sys.platform == "linux":
        enforced.append("daemons die with their program")
    else:
        not_stopped.append("leaving daemons behind")
    return Capabilities(
        backend="subprocess",
        isolation=Isolation.PROCESS,
        enforces=tuple(enforced),
        cannot_stop=tuple(not_stopped),
    )
