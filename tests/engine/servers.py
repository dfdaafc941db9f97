"""Servers for tests: scripted ones, and real ones where their environments exist. A helper of tests."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from aiohttp import web

from areal_agent.cluster.servers import KeptServers
from areal_agent.engine.config import EngineConfig
from areal_agent.types import WeightVersion

Start = Callable[[EngineConfig, Path, WeightVersion, Path], AbstractAsyncContextManager[KeptServers]]

STARTUP_S = 600.0
BEGUN_WITH = WeightVersion(step=7)


@asynccontextmanager
async def serving_app(app: web.Application) -> AsyncGenerator[str]:
    """Serve an application; yield its URL."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def running_server(start: Start, python: str, model: Path, logs: Path, **options: object) -> Generator[str]:
    """Yield the URL of a server for `model` with an event loop of its own, so that tests with any loop can share it."""
    settings = {"python": python, "max_running_requests": 16, "startup_timeout_s": STARTUP_S}
    config = EngineConfig.model_validate(settings | options)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        (url,) = runner.run(stack.enter_async_context(start(config, model, BEGUN_WITH, logs))).urls
        try:
            yield url
        finally:
            runner.run(stack.aclose())
