"""A server that is started at another URL takes the place of the one that died, with the weights that are due."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from areal_agent.cluster.engines import follow_news
from areal_agent.cluster.hosts import LOCAL, Process
from areal_agent.cluster.servers import KeptServer, keep_servers
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.fleet.member import MemberState
from areal_agent.process import beside
from areal_agent.types import WeightVersion
from tests.cluster.conftest import serving

SERVED = WeightVersion(step=7)


async def test_a_server_that_is_started_elsewhere_replaces_the_one_that_died(small_model: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(small_model, version=SERVED))
        second = await stack.enter_async_context(serving(small_model))
        urls = iter([first.base_url, second.base_url])

        async def start() -> Process:
            return await LOCAL.start("engine", ["sleep", "100000"], log_path=tmp_path / "engine.log")

        async def serves(_: Process) -> str:
            return next(urls)

        async def end(process: Process) -> None:
            await process.aclose()

        servers = await stack.enter_async_context(keep_servers([KeptServer(start, serves, end)]))
        fleet = EngineAddress(backend="embedded", urls=servers.urls).connect()
        stack.push_async_callback(fleet.aclose)
        await fleet.info()
        fleet.pushes.begin_with(small_model, SERVED)
        await stack.enter_async_context(beside(follow_news(fleet, servers)))
        os.kill(servers.process_ids()["engine"], signal.SIGKILL)
        await first.aclose()
        async with asyncio.timeout(60.0):  # only a hang is longer
            while [(one.url, one.state) for one in fleet.report()] != [(second.base_url, MemberState.SERVING)]:
                await fleet.roster.changed()
        assert (await fleet.info()).weight_version == SERVED
