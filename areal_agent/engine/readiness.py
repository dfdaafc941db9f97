"""Waiting until a server serves: nothing in this process tells when another one does."""

import asyncio
from collections.abc import Awaitable, Callable

from areal_agent.errors import EngineUnreachable

POLL_S = 0.1


async def wait_until_healthy(who: str, health: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Ask again and again. Raises EngineUnreachable when `who` does not serve within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await health():  # noqa: ASYNC110 (nothing in this process tells when another one serves)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise EngineUnreachable(
            f"{who} did not serve within {timeout_s:g} s; see its log, or raise engine.startup_timeout_s"
        ) from None
