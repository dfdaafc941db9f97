"""An event loop that sleeps when a test says so: it does not run while time goes on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SleptLoop(asyncio.SelectorEventLoop):
    """A loop whose clock is ahead of the machine's by the time that it has slept."""

    slept_s = 0.0

    def time(self) -> float:
        return super().time() + self.slept_s

    def sleep(self, seconds: float) -> None:
        """Sleep: everything due within that time is late afterwards."""
        self.slept_s += seconds


def run_in_slept_loop(work: Callable[[SleptLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end."""
    loop = SleptLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work(loop))
