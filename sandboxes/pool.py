"""A pool: sandboxes on demand, from a stock of started ones, and a bound on the programs that run at once.

A checkout costs nothing until it is used, so an agent may hold its sandbox while it thinks; what is bounded is programs
at once, first come first served, and cells that stand ready or are being started (`stock.py`).
"""

import asyncio
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sandboxes.backends import Backend, refuse_less, start_provider
from sandboxes.base import Capabilities, Provider
from sandboxes.limits import Limits
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Isolation, SandboxSpec
from sandboxes.stock import Stock

DEFAULTS = Limits()
DESCRIPTORS_A_PROGRAM = 4
DESCRIPTORS_OF_HOST = 128


@asynccontextmanager
async def open_pool(
    *,
    backend: Backend,
    min_isolation: Isolation | str | None = None,
    wall_s: float = DEFAULTS.wall_s,
    memory_bytes: int = DEFAULTS.memory_bytes,
    output_bytes: int = DEFAULTS.output_bytes,
    max_concurrent: int = 16,
    max_idle: int = 8,
) -> AsyncGenerator["Pool", None]:
    """Open a pool; leaving it kills every program and removes every file.

    `auto` takes the strongest backend that works here and logs which. SandboxError when it isolates less than
    `min_isolation`, or when the backend that is named does not work here. None: `auto` and `embedded` do not fall back
    on plain processes. `max_concurrent`: programs at once; `max_idle`: sandboxes that stand ready, at most.
    """
    check_max_concurrent(max_concurrent)
    limits = Limits(wall_s=wall_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    least = None if min_isolation is None else Isolation(min_isolation)
    pool = Pool(await start_provider(backend, least), limits, max_concurrent, max_idle)
    try:
        yield pool
    finally:
        await pool.close()


class Pool:
    """Hands out sandboxes of a provider, which it owns. `limits` are those of a spec that names none."""

    def __init__(self, provider: Provider, limits: Limits, max_concurrent: int, max_idle: int = 8) -> None:
        self._provider = provider
        self._limits = limits
        self._slots = asyncio.Semaphore(max_concurrent)  # wakes its waiters in their order
        self._stock = Stock(provider, max_idle=max_idle)

    def capabilities(self) -> Capabilities:
        return self._provider.capabilities()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec | None = None) -> AsyncGenerator[Sandbox, None]:
        """A fresh sandbox, closed on leaving. SandboxError when the backend cannot give what `spec` asks."""
        spec = spec or SandboxSpec()
        self.check(spec)
        sandbox = Sandbox(self._stock.take, spec, self._limits, self._slots)
        try:
            await sandbox.prepare()
            yield sandbox
        finally:
            await sandbox.close()

    async def warm(self, spec: SandboxSpec | None = None, *, num_cells: int) -> None:
        """Have so many of a kind stand ready, as far as `max_idle` lets, before the first is asked for."""
        spec = spec or SandboxSpec()
        self.check(spec)
        await self._stock.warm(spec.cell(self._limits), num_cells)

    def check(self, spec: SandboxSpec) -> None:
        """SandboxError when the backend cannot give what `spec` asks."""
        capabilities = self.capabilities()
        refuse_less(capabilities.backend, capabilities.isolation, spec.min_isolation)
        self._stock.check_open()
        self._provider.check(spec.cell(self._limits))

    async def reap(self) -> int:
        """Remove what dead owners left on this machine; how many things there were."""
        return await self._provider.reap()

    async def close(self) -> None:
        """Close every sandbox. Harmless when it is closed already."""
        await self._stock.aclose()
        await self._provider.close()


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
