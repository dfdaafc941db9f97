"""A pool: sandboxes on demand, and a bound on the programs that run at once. It knows no backend but by its name.

A checkout costs nothing until a program runs, so an agent may hold its sandbox while it thinks; what is bounded is
programs at once, first come first served.
"""

import asyncio
import resource
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from sandboxes.base import Capabilities, ExecResult, Limits, Provider, Sandbox, SandboxSpec
from sandboxes.subprocess import SubprocessProvider

DEFAULTS = Limits()
DESCRIPTORS_A_PROGRAM = 4
DESCRIPTORS_OF_HOST = 128


@asynccontextmanager
async def open_pool(
    *,
    backend: Literal["subprocess"],
    wall_s: float = DEFAULTS.wall_s,
    memory_bytes: int = DEFAULTS.memory_bytes,
    output_bytes: int = DEFAULTS.output_bytes,
    max_concurrent: int = 16,
) -> AsyncGenerator["Pool", None]:
    """Open a pool; leaving it kills every program and removes every file."""
    if backend != "subprocess":
        raise ValueError(f"sandbox backend {backend!r} does not exist; there is 'subprocess'")
    check_max_concurrent(max_concurrent)
    limits = Limits(wall_s=wall_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    pool = Pool(await SubprocessProvider.start(limits), max_concurrent)
    try:
        yield pool
    finally:
        await pool.close()


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
