"""What bounds all programs of one container together: memory, processes, CPUs; as the program that runs asks for it.

As many programs run at once as there may be processes; others wait, first come first served, and not for ever, for all
of these have deadlines. A program that is talked with has none: it neither waits nor is waited for.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from sandboxes.containers.confinement import Bounds
from sandboxes.limits import Limits


class SharedBounds:
    """The bounds of one container. `change` makes the engine change them."""

    def __init__(self, bounds: Bounds, change: Callable[[Bounds], Awaitable[None]]) -> None:
        self._bounds = bounds
        self._change = change
        self._changing = asyncio.Lock()
        self._slots = asyncio.Semaphore(bounds.pids)
        self._num_held = 0

    @asynccontextmanager
    async def held(self, limits: Limits) -> AsyncGenerator[None, None]:
        """For one program that is run to its end."""
        await self.hold(limits)
        try:
            async with self.slot():
                yield
        finally:
            self.release()

    def slot(self) -> asyncio.Semaphore:
        """To be held by what needs a process."""
        return self._slots

    async def hold(self, limits: Limits) -> None:
        """For one program, until `release`. ValueError when others run within other bounds."""
        async with self._changing:
            bounds = Bounds.of(limits)
            if bounds != self._bounds:
                if self._num_held:
                    raise ValueError(
                        f"a program asks for {bounds} while others run within {self._bounds}, and the programs of a "
                        "container share memory, processes and CPUs; give them in SandboxSpec.limits, or run it alone"
                    )
                await self._change(bounds)
                self._bounds = bounds
                self._slots = asyncio.Semaphore(bounds.pids)
            self._num_held += 1

    def release(self) -> None:
        """It has ended."""
        self._num_held -= 1
