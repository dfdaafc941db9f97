"""An event loop that has slept when a test says so: it was kept from running, and time went on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SleptLoop(asyncio.SelectorEventLoop):
    """Its time is ahead of the machine's by what it has slept."""

    slept_s = 0.0

    def time(self) -> float:
        return super().time() + self.slept_s

    def sleep(self, seconds: float) -> None:
        """All that is due within that time is late now."""
        self.slept_s += seconds


def run_in_slept_loop(work: Callable[[SleptLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end."""
    loop = SleptLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work(loop))
