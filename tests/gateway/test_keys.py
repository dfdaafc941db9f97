"""Which key may make which call:

- a missing or wrong key gets 401; a session's key in place of the admin key, or the reverse, gets 403
- an error about the admin key says where that key is
- a session's key gives access to its own session only, whichever header has it and whatever another one has
- health needs no key
"""

import pytest

from .conftest import ADMIN_KEY, OpenAgent, OpenWorld

SESSION_PATHS = ["/v1/chat/completions", "/chat/completions", "/rl/set_reward", "/rl/end_session"]
ADMIN_PATHS = ["/rl/start_session", "/export_trajectories"]


async def test_without_a_valid_key(open_world: OpenWorld) -> None:
    world = await open_world()
    for path in SESSION_PATHS + ADMIN_PATHS:
        for key in (None, "sk-wrong", " "):
            status, answer = await world.call(path, {}, key=key)
            assert (status, answer["error"]["type"]) == (401, "authentication_error"), (path, key)
            if path in ADMIN_PATHS and key == "sk-wrong":
                message = answer["error"]["message"]
                assert "needs the gateway's admin key" in message and "in the file admin_key" in message


async def test_a_key_of_the_other_kind(open_agent: OpenAgent) -> None:
    agent = await open_agent()
    for path in SESSION_PATHS:
        assert (await agent.world.call(path, {}, key=ADMIN_KEY))[0] == 403
    for path in ADMIN_PATHS:
        status, answer = await agent.world.call(path, {"session_id": agent.id, "task_id": "t"}, key=agent.key)
        assert (status, answer["error"]["type"]) == (403, "permission_error")


async def test_a_key_reaches_its_own_session(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>")
    one, other = await world.start(), await world.start()
    await one.ask()
    await one.end()
    assert (len(one.turns), len(other.turns)) == (1, 0)
    assert (await other.reward(reward=1))[0] == 200  # the other goes on


@pytest.mark.parametrize("other", ["Basic eDp5", "Bearer sk-ant-oat-of-another-service", "Bearer"])
@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
async def test_a_token_of_another_service_is_ignored(open_agent: OpenAgent, other: str, header: str) -> None:
    agent = await open_agent()
    for headers in ({"Authorization": other, header: agent.key}, {"Authorization": f"Bearer {agent.key}", header: "x"}):
        async with agent.world.http.post(
            f"{agent.world.url}/rl/set_reward", json={"reward": 1}, headers=headers
        ) as reply:
            assert reply.status == 200


async def test_health_needs_no_key(open_world: OpenWorld) -> None:
    world = await open_world()
    async with world.http.get(f"{world.url}/health") as response:
        assert response.status == 200
        assert (await response.json())["status"] == "ok"
