"""Many sessions at once, each with a call in flight at the same moment; none of them fails.

500 by default, 2,000 when full.
"""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from areal_agent.process import allow_many_connections

from .conftest import ADMIN_KEY, OpenWorld

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
async def many_connections() -> AsyncIterator[aiohttp.ClientSession]:
    allow_many_connections()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield http


@pytest.mark.parametrize("num_sessions", [500, pytest.param(2000, marks=pytest.mark.full)])
async def test_many_sessions_at_once(
    open_world: OpenWorld, many_connections: aiohttp.ClientSession, num_sessions: int
) -> None:
    world = await open_world(script=lambda request: world.ids("a<|im_end|>"), is_stepped=True)

    async def post(path: str, key: str, body: object) -> dict[str, object]:
        headers = {"Authorization": f"Bearer {key}"}
        async with many_connections.post(world.url + path, headers=headers, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def roll_out(number: int) -> object:
        key = str((await post("/rl/start_session", ADMIN_KEY, {"task_id": f"t{number}"}))["api_key"])
        messages = [{"role": "user", "content": f"question {number}"}]
        await post("/v1/chat/completions", key, {"model": "model", "messages": messages})
        await post("/rl/set_reward", key, {"reward": number})
        return (await post("/rl/end_session", key, {}))["num_turns"]

    rollouts = asyncio.gather(*(roll_out(number) for number in range(num_sessions)))
    await world.engine.wait_for_requests(num_sessions)
    assert world.gateway.stats().num_open_sessions == num_sessions
    assert world.engine.num_in_flight == num_sessions
    world.engine.step(9)
    assert await rollouts == [1] * num_sessions
    assert world.gateway.stats().errors == {}
