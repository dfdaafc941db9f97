"""The HTTP clients that all rollouts of a process share. A connection pool a rollout would cost more than its turns.

They ignore the proxies of the environment: a gateway stands on this machine. They know no rollout and no gateway.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import httpx
from httpx_aiohttp import HttpxAiohttpClient


@dataclass(frozen=True, kw_only=True, slots=True)
class Clients:
    """Made by `open_clients`. None of them times out by itself: a rollout's time is the runner's business."""

    control: aiohttp.ClientSession  # the runner's own, for `/rl/*`
    agents: httpx.AsyncClient  # under the `openai` client of a workflow
    threads: httpx.Client  # under that of a workflow that runs in a thread


@asynccontextmanager
async def open_clients() -> AsyncGenerator[Clients]:
    """The clients, closed on leaving."""
    async with AsyncExitStack() as stack:
        unlimited = httpx.Limits(max_connections=None)
        yield Clients(
            control=await stack.enter_async_context(aiohttp.ClientSession()),
            # httpx's own pool costs 10 ms of CPU a turn at 64 agents, aiohttp's 1.3 (benchmarks/agent_client)
            agents=await stack.enter_async_context(HttpxAiohttpClient(trust_env=False, timeout=None, limits=unlimited)),
            threads=stack.enter_context(httpx.Client(trust_env=False, timeout=None, limits=unlimited)),
        )
