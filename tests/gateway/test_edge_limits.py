"""Limits on sessions and calls, timeouts, and draining:

- one session too many gets 429 with Retry-After; when one ends, there is room
- one call too many of a session gets the same, and other sessions are not affected
- a session without a call for the limit ends as `timeout`; one with a call in flight is not silent
- a session that cannot be ended does not keep the others from ending
- draining: nothing new begins (503, Retry-After), calls in flight are answered, rewards and ends are accepted, then
  open sessions end as `cancelled`; calls that take too long are aborted; a broken journal does not block it
"""

import asyncio
from collections.abc import Iterator

from areal_agent.errors import LedgerError
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.sessions import Traffic
from areal_agent.types import Status, Trajectory, Turn

from .conftest import ADMIN_KEY, MemoryJournal, OpenAgent, OpenWorld, World


class BrokenJournal(MemoryJournal):
    """Cannot write the end of one session."""

    def __init__(self, broken_id: str) -> None:
        super().__init__()
        self._broken_id = broken_id

    async def close_session(self, trajectory: Trajectory) -> None:
        if trajectory.session_id == self._broken_id:
            raise LedgerError("disk full")
        await super().close_session(trajectory)


async def retry_after(world: World, path: str, body: object, key: str = ADMIN_KEY) -> tuple[int, str, int]:
    """Status, error code and Retry-After of a refusal."""
    headers = {"Authorization": f"Bearer {key}"}
    async with world.http.post(world.url + path, json=body, headers=headers) as response:
        error = (await response.json())["error"]
        return response.status, error["code"], int(response.headers["Retry-After"])


async def health(world: World) -> str:
    async with world.http.get(f"{world.url}/health") as response:
        return (await response.json())["status"]


async def test_one_session_too_many(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(max_sessions=2))
    first, _ = await world.start(), await world.start()
    status, code, wait_s = await retry_after(world, "/rl/start_session", {"task_id": "t"})
    assert (status, code) == (429, "too_many_sessions")
    assert wait_s > 0
    await first.end()
    await world.start()


async def test_a_session_that_never_opened_takes_no_room(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(max_sessions=2))
    await world.start(session_id="one")
    for _ in range(3):
        assert (await world.call("/rl/start_session", {"task_id": "t", "session_id": "one"}))[0] == 409
    await world.start()


async def test_one_call_too_many(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", "b<|im_end|>", is_stepped=True, limits=Limits(max_calls_per_session=1))
    agent, other = await world.start(), await world.start()
    call = await agent.under_way(agent.post_chat())
    body = {"model": "model", "messages": [{"role": "user", "content": "x"}]}
    assert (await retry_after(world, "/v1/chat/completions", body, agent.key))[:2] == (429, "too_many_calls")
    other_call = asyncio.create_task(other.post_chat())
    await world.engine.wait_for_requests(2)
    world.engine.step(9)
    assert ((await call)[0], (await other_call)[0]) == (200, 200)
    assert (await agent.reward(reward=1))[0] == 200  # there is room again: what was refused is not counted


async def test_a_silent_session_times_out(open_agent: OpenAgent) -> None:
    agent = await open_agent(limits=Limits(session_timeout_s=0.05))
    await agent.world.journal.has_closed.wait()
    assert agent.world.journal.closed[agent.id].status is Status.TIMEOUT
    assert (await agent.post_chat())[0] == 409
    assert agent.world.gateway.stats().ended_by_timeout == 1


async def test_the_next_session_times_out_all_the_same(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(session_timeout_s=0.05), journal=BrokenJournal("one"))
    await world.start(session_id="one")
    agent = await world.start()
    await world.journal.has_closed.wait()
    assert list(world.journal.closed) == [agent.id]


def clock(*times_s: float) -> Iterator[float]:
    return iter(times_s)


def test_a_call_in_flight_is_no_silence() -> None:
    traffic = Traffic(Limits(), now_s=clock(0.0, 100.0, 101.0, 111.0).__next__)
    traffic.enter("one")
    with traffic.call("one"):
        assert traffic.silent_for(10.0) == []
        # the call ends at 101.0
    assert traffic.silent_for(10.0) == ["one"]


async def test_draining(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", is_stepped=True)
    busy, ending, idle = await world.start(), await world.start(), await world.start()
    call = asyncio.create_task(busy.post_chat())
    await world.engine.wait_for_requests(1)
    drain = asyncio.create_task(world.gateway.drain(60.0))
    assert await health(world) == "draining"
    assert (await retry_after(world, "/rl/start_session", {"task_id": "t"}))[:2] == (503, "draining")
    assert (await retry_after(world, "/v1/chat/completions", {}, idle.key))[:2] == (503, "draining")
    assert (await ending.reward(reward=1))[0] == 200
    assert (await ending.end(status="rejected"))[0] == 200
    assert not drain.done()
    world.engine.step(9)
    assert (await call)[0] == 200
    assert await drain == 2
    assert {name: one.status for name, one in world.journal.closed.items()} == {
        busy.id: Status.CANCELLED,
        ending.id: Status.REJECTED,
        idle.id: Status.CANCELLED,
    }
    assert len(busy.turns) == 1


async def test_draining_aborts_what_takes_too_long(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc", is_stepped=True)
    call = await agent.under_way(agent.post_chat())
    assert await agent.world.gateway.drain(0.0) == 1
    assert (await call)[0] == 409
    assert agent.world.engine.aborted_ids == [agent.world.engine.requests[0].request_id]


async def test_draining_with_a_broken_journal(open_world: OpenWorld) -> None:
    world = await open_world(journal=BrokenJournal("one"))
    await world.start(session_id="one")
    await world.start(session_id="two")
    assert await world.gateway.drain(1.0) == 1
    assert list(world.journal.closed) == ["two"]


class FullJournal(MemoryJournal):
    """Has no room for turns."""

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        raise LedgerError("disk full")


async def test_a_turn_that_could_not_be_written_is_no_undelivered_answer(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", journal=FullJournal())
    agent = await world.start()
    status, _ = await agent.post_chat()
    assert status == 500
    await world.call("/rl/end_session", {"status": "error"}, key=agent.key)
    trajectory = world.journal.closed[agent.id]
    assert (trajectory.turns, trajectory.undelivered) == ((), ())
