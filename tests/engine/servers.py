"""Real servers for tests, where their environments exist. A helper of tests."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from pathlib import Path

from areal_agent.cluster.servers import KeptServers
from areal_agent.engine.config import EngineConfig
from areal_agent.types import WeightVersion

Start = Callable[[EngineConfig, Path, WeightVersion, Path], AbstractAsyncContextManager[KeptServers]]

STARTUP_S = 600.0
BEGUN_WITH = WeightVersion(step=7)


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
