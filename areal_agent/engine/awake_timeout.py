"""A time limit for an answer of somebody else, in which the time that this process has slept itself does not count.

An event loop that was kept from running finds that all limits have passed, and what has come meanwhile not read yet.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

LATE_S = 1.0
"""A limit that is noticed so much too late has been slept through."""
MAX_SLEEPS = 5
"""How often it begins anew: a process that is late all the time waits for nobody without an end."""


@asynccontextmanager
async def awake_timeout(limit_s: float) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, but that it begins anew when it was slept through."""
    loop = asyncio.get_running_loop()
    num_sleeps = 0

    def end() -> None:
        nonlocal ending, num_sleeps
        if loop.time() - ending.when() < LATE_S or num_sleeps == MAX_SLEEPS:
            limit.reschedule(loop.time())
        else:
            num_sleeps += 1
            ending = loop.call_later(limit_s, end)

    async with asyncio.timeout(None) as limit:
        ending = loop.call_later(limit_s, end)
        try:
            yield
        finally:
            ending.cancel()
