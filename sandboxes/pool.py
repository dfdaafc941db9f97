"""A pool: sandboxes on demand, and a bound on the programs that run at once. It chooses a backend.

A checkout costs nothing until a program runs, so an agent may hold its sandbox while it thinks; what is bounded is
programs at once, first come first served.
"""

import asyncio
import logging
import resource
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from areal_agent.errors import SandboxError
from sandboxes.base import Capabilities
from sandboxes.bubblewrap import BubblewrapProvider
from sandboxes.jail import Walls
from sandboxes.limits import Limits
from sandboxes.result import ExecResult
from sandboxes.spec import Isolation, SandboxSpec
from sandboxes.subprocess import SubprocessProvider

logger = logging.getLogger(__name__)

Backend = Literal["auto", "bubblewrap", "namespaces", "subprocess"]
"""`bubblewrap` takes namespaces by system calls where bubblewrap is missing; `namespaces` takes nothing else."""
ISOLATION_OF: dict[str, Isolation] = {
    "bubblewrap": Isolation.NAMESPACES,
    "namespaces": Isolation.NAMESPACES,
    "subprocess": Isolation.PROCESS,
}
BACKENDS = ("auto", *ISOLATION_OF)

DEFAULTS = Limits()
DESCRIPTORS_A_PROGRAM = 4
DESCRIPTORS_OF_HOST = 128


class Sandbox(Protocol):
    """A working directory in which programs run; any number at once. It is gone after `close`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program; `cwd` is relative to the working directory. Cancelling the call kills it.

        An `argv[0]` that cannot be run ends as in a shell: 127 or 126, the reason on stderr.
        """
        ...

    async def exec_python(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        """Run Python source as `__main__`, in a process of its own. Cancelling the call kills it."""
        ...

    async def read(self, path: str) -> bytes:
        """The bytes of a regular file in the working directory; SandboxError for anything else."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in the working directory, folders included."""
        ...

    async def close(self) -> None:
        """Kill what runs in it and remove its files. Harmless when it is closed already."""
        ...


class Provider(Protocol):
    """Makes sandboxes of one backend."""

    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox; raises SandboxError when the backend cannot give what `spec` asks."""
        ...

    async def close(self) -> None:
        """Close every sandbox and release what the backend holds. Harmless when it is closed already."""
        ...


@asynccontextmanager
async def open_pool(
    *,
    backend: Backend,
    min_isolation: Isolation | str = Isolation.NONE,
    wall_s: float = DEFAULTS.wall_s,
    memory_bytes: int = DEFAULTS.memory_bytes,
    output_bytes: int = DEFAULTS.output_bytes,
    max_concurrent: int = 16,
) -> AsyncGenerator["Pool", None]:
    """Open a pool; leaving it kills every program and removes every file.

    `auto` takes the strongest backend that works here and logs which. SandboxError when it isolates less than
    `min_isolation`, or when the backend that is named does not work here.
    """
    check_max_concurrent(max_concurrent)
    limits = Limits(wall_s=wall_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    pool = Pool(await start_provider(backend, limits, Isolation(min_isolation)), max_concurrent)
    try:
        yield pool
    finally:
        await pool.close()


async def start_provider(backend: Backend, limits: Limits, min_isolation: Isolation) -> Provider:
    """The provider of a backend; nothing is left of one that isolates too little."""
    if backend not in BACKENDS:
        raise ValueError(f"sandbox backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")
    if backend == "auto":
        return await start_strongest(limits, min_isolation)
    refuse_less(backend, ISOLATION_OF[backend], min_isolation)
    if backend == "subprocess":
        return await SubprocessProvider.start(limits)
    return await BubblewrapProvider.start(limits, (Walls.NAMESPACES,) if backend == "namespaces" else tuple(Walls))


async def start_strongest(limits: Limits, min_isolation: Isolation) -> Provider:
    """Bubblewrap or its like, else plain processes, as far as `min_isolation` lets."""
    refuse_less("strongest", Isolation.NAMESPACES, min_isolation)
    try:
        return await BubblewrapProvider.start(limits)
    except SandboxError as error:
        refuse_less(f"strongest that works here ({error})", Isolation.PROCESS, min_isolation)
        logger.warning("sandbox backend: subprocess, for %s", error)
    return await SubprocessProvider.start(limits)


def refuse_less(backend: str, isolation: Isolation, min_isolation: Isolation) -> None:
    """SandboxError when a backend isolates less than is asked."""
    if not isolation.covers(min_isolation):
        raise SandboxError(
            f"min_isolation is {min_isolation.value!r}, the {backend} backend gives only {isolation.value!r}; "
            "use a stronger backend, or ask for less"
        )


class Pool:
    """Hands out sandboxes of a provider, which it owns."""

    def __init__(self, provider: Provider, max_concurrent: int) -> None:
        self._provider = provider
        self._slots = asyncio.Semaphore(max_concurrent)  # wakes its waiters in their order

    def capabilities(self) -> Capabilities:
        return self._provider.capabilities()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec | None = None) -> AsyncGenerator[Sandbox, None]:
        """A fresh sandbox, closed on leaving."""
        sandbox = await self._provider.create(spec or SandboxSpec())
        try:
            yield PooledSandbox(sandbox, self._slots)
        finally:
            await sandbox.close()

    async def close(self) -> None:
        """Close every sandbox. Harmless when it is closed already."""
        await self._provider.close()


class PooledSandbox:
    """A sandbox whose programs wait for a slot of the pool. Their time begins when they have it."""

    def __init__(self, sandbox: Sandbox, slots: asyncio.Semaphore) -> None:
        self._sandbox = sandbox
        self._slots = slots

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        async with self._slots:
            return await self._sandbox.exec(argv, stdin=stdin, env=env, cwd=cwd, limits=limits)

    async def exec_python(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        async with self._slots:
            return await self._sandbox.exec_python(source, stdin=stdin, limits=limits)

    async def read(self, path: str) -> bytes:
        return await self._sandbox.read(path)

    async def write(self, path: str, data: bytes) -> None:
        await self._sandbox.write(path, data)

    async def close(self) -> None:
        await self._sandbox.close()


def check_max_concurrent(max_concurrent: int) -> None:
    """ValueError for a number of programs that this process has not the descriptors for."""
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent is {max_concurrent}; give at least 1")
    available, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_concurrent * DESCRIPTORS_A_PROGRAM + DESCRIPTORS_OF_HOST
    if available != resource.RLIM_INFINITY and needed > available:
        raise ValueError(
            f"max_concurrent={max_concurrent} needs {needed} open files and this process may have {available}; "
            f"lower it, or raise the limit (ulimit -n)"
        )
