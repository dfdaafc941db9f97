"""Servers for tests: scripted ones, and real ones where their environments exist. A helper of tests."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from areal_agent.cluster.engines import RunningEngine, open_engine
from areal_agent.cluster.servers import KeptServers
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberState
from areal_agent.types import WeightVersion

Start = Callable[[EngineConfig, Path, WeightVersion, Path], AbstractAsyncContextManager[KeptServers]]

STARTUP_S = 600.0
FLEET_S = 1200.0  # a test with two servers; only a hang is longer
BEGUN_WITH = WeightVersion(step=7)


def python_of(kind: str) -> str:
    """Return the Python of SGLang's or vLLM's environment; skip the test where there is none."""
    variable = f"AREAL_AGENT_{kind.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} is not set: make it with python -m areal_agent.engine.environment {kind} DIR")
    if not Path(python).is_file():
        pytest.skip(f"{variable} is {python!r}, and there is no such file")
    return python


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


class ScriptedServer:
    """Answers requests with `events`; what else it answers is that of its kind.

    `load_statuses` are the answers to loads one by one, then loads succeed.
    """

    def __init__(self) -> None:
        self.load_statuses: list[int] = []
        self.moves_label = True
        self.is_alive = True
        self.num_broken = 0  # of the next answers, which end before their last event
        self.events: list[dict[str, object]] = []
        self.bodies: list[dict[str, object]] = []  # of requests
        self.calls: list[str] = []
        self.peers: set[object] = set()

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.calls.append(request.path_qs)
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        return await handler(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        self.num_broken, is_broken = max(0, self.num_broken - 1), self.num_broken > 0
        for event in self.events[:-1] if is_broken else self.events:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def yes(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


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


@dataclass(kw_only=True, slots=True)
class RunningFleet:
    """The engine side of a run with several servers."""

    engine: RunningEngine
    fleet: Fleet

    def process_id(self, url: str) -> int:
        servers = self.engine.servers
        assert servers is not None
        return list(servers.process_ids().values())[servers.urls.index(url)]

    async def until_all_serve(self, version: WeightVersion) -> None:
        while any(  # noqa: ASYNC110 (a fleet tells nobody of its servers' states)
            one.state is not MemberState.SERVING or one.version != version for one in self.fleet.report()
        ):
            await asyncio.sleep(0.5)


@asynccontextmanager
async def running_fleet(model: Path, logs: Path, **options: object) -> AsyncGenerator[RunningFleet]:
    """Start two servers for `model`, as a run does."""
    limits = {"max_running_requests": 16, "startup_timeout_s": STARTUP_S, "wait_s": STARTUP_S}
    config = EngineConfig.model_validate({"num_servers": 2} | limits | options)
    async with asyncio.timeout(FLEET_S), open_engine(config, model, BEGUN_WITH, logs) as engine:
        assert isinstance(engine.client, Fleet)
        await engine.client.info()
        yield RunningFleet(engine=engine, fleet=engine.client)
