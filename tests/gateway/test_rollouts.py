"""Sessions and their rewards:

- a started session is in the journal, with the hash of its key and the body's values or their defaults
- a session id is used once
- rewards: final, by completion, named parts; numbers of every kind; a later one replaces an earlier one
- refused: a reward that is not a number or too large for 32 bits, a part of one completion, another session's
  completion
- the end journals the trajectory and answers with its figures; nothing is accepted afterwards
- completed without a reward is missing_reward, without a turn an error; other statuses stand
- an ended session can be exported with its token records; an open, unknown or forgotten one cannot
- `group_size` is only for gateways that a trainer leases from
"""

from hashlib import sha256
from typing import Any

import pytest

from areal_agent.gateway.sessions import NUM_ENDED_KEPT
from areal_agent.types import Rewards, SessionPurpose, Status

from .conftest import OpenAgent, OpenWorld


async def test_a_started_session_is_in_the_journal(open_world: OpenWorld) -> None:
    world = await open_world()
    agent = await world.start(session_id="s1", group_id="g1", purpose="eval", seed=7)
    record = world.journal.sessions["s1"]
    assert (record.id, record.group_id, record.task_id, record.seed) == ("s1", "g1", "task", 7)
    assert record.purpose is SessionPurpose.EVAL
    assert record.key_hash == sha256(agent.key.encode()).hexdigest()
    assert agent.key.startswith("sk-")


async def test_what_is_left_out_is_made_up(open_world: OpenWorld) -> None:
    world = await open_world()
    one, other = await world.start(), await world.start()
    assert one.id != other.id
    record = world.journal.sessions[one.id]
    assert record.group_id == one.id
    assert record.purpose is SessionPurpose.TRAIN
    assert record.seed != world.journal.sessions[other.id].seed


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "task_id"),
        ({"task_id": ""}, "task_id"),
        ({"task_id": "t", "purpose": "fun"}, "purpose"),
        ({"task_id": "t", "seed": -1}, "seed"),
        ({"task_id": "t", "sampling": {"temperature": 9}}, "sampling.temperature"),
        ({"task_id": "t", "sampling": {"stop": "x"}}, "sampling.stop"),
        ({"task_id": "t", "taskid": "t"}, "taskid"),
    ],
)
async def test_a_wrong_start_is_refused(open_world: OpenWorld, body: Any, param: str) -> None:
    world = await open_world()
    status, answer = await world.call("/rl/start_session", body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_session_id_is_used_once(open_world: OpenWorld) -> None:
    world = await open_world()
    await world.start(session_id="s1")
    status, answer = await world.call("/rl/start_session", {"task_id": "t", "session_id": "s1"})
    assert (status, answer["error"]["code"]) == (409, "session_exists")


async def test_rewards_of_every_kind(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    reply = await agent.ask()
    for body in (
        {"reward": 0.0},
        {"reward": True},
        {"reward": 2, "interaction_id": reply.id},
        {"reward": -0.5, "name": "format"},
        {"reward": 3, "name": "style"},
    ):
        assert (await agent.reward(**body))[0] == 200
    await agent.end()
    assert agent.world.journal.closed[agent.id].rewards == Rewards(
        final=1.0, by_completion={reply.id: 2.0}, parts={"format": -0.5, "style": 3.0}
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"reward": NaN}',
        b'{"reward": 1e999}',
        b'{"reward": 3.5e38}',
        b'{"reward": -1e31}',
        b'{"reward": 1' + b"0" * 400 + b"}",
        b'{"reward": "1"}',
        b'{"reward": [1]}',
        b'{"reward": null}',
        b"{}",
    ],
    ids=lambda body: repr(body)[:30],
)
async def test_what_a_trainer_could_not_add_up_is_refused(open_agent: OpenAgent, body: bytes) -> None:
    agent = await open_agent()
    assert (await agent.world.call("/rl/set_reward", body, key=agent.key))[0] == 400


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (1e300, "reward is 1e+300; it must be a number from -1e+30 to 1e+30, or a boolean; scale it down"),
        ("1", "reward is '1'; it must be a number from -1e+30 to 1e+30, or a boolean"),
    ],
)
async def test_a_refused_reward_is_told_with_the_remedy(open_agent: OpenAgent, reward: object, told: str) -> None:
    status, answer = await (await open_agent()).reward(reward=reward)
    assert (status, answer["error"]["param"]) == (400, "reward")
    assert answer["error"]["message"] == told


async def test_a_completion_has_no_parts(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    reply = await agent.ask()
    status, answer = await agent.reward(reward=1, name="style", interaction_id=reply.id)
    assert (status, answer["error"]["param"]) == (400, "name")


async def test_a_completion_of_another_session_is_not_rewarded(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>")
    one, other = await world.start(), await world.start()
    reply = await one.ask()
    status, answer = await other.reward(reward=1, interaction_id=reply.id)
    assert (status, answer["error"]["param"]) == (400, "interaction_id")


async def test_the_end_journals_the_trajectory(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>")
    agent = await world.start(group_id="g1")
    await agent.ask()
    await agent.reward(reward=1)
    status, answer = await agent.end(logged={"steps": 3})
    assert status == 200
    counts = {"num_turns": 1, "num_sampled_tokens": 2}
    assert answer == {"session_id": agent.id, "status": "completed", "error": None} | counts
    trajectory = world.journal.closed[agent.id]
    assert trajectory.turns == tuple(agent.turns)
    assert (trajectory.group_id, trajectory.task_id, trajectory.logged) == ("g1", "task", {"steps": 3})
    assert trajectory.started_s <= trajectory.ended_s


async def test_nothing_is_taken_after_the_end(open_agent: OpenAgent) -> None:
    agent = await open_agent()
    await agent.end()
    for status, answer in (await agent.post_chat(), await agent.reward(reward=1)):
        assert (status, answer["error"]["code"]) == (409, "session_ended")
    assert agent.world.gateway.stats().num_open_sessions == 0


@pytest.mark.parametrize(
    ("has_turn", "has_reward", "said", "status"),
    [
        (True, True, None, Status.COMPLETED),
        (True, False, "completed", Status.MISSING_REWARD),
        (False, True, "completed", Status.ERROR),
        (False, False, "timeout", Status.TIMEOUT),
        (True, True, "rejected", Status.REJECTED),
    ],
)
async def test_a_session_ends_as_what_it_is(
    open_agent: OpenAgent, has_turn: bool, has_reward: bool, said: str | None, status: Status
) -> None:
    agent = await open_agent("a<|im_end|>")
    if has_turn:
        await agent.ask()
    if has_reward:
        await agent.reward(reward=0)
    assert (await agent.end(status=said))[1]["status"] == status
    trajectory = agent.world.journal.closed[agent.id]
    assert trajectory.status is status
    assert (trajectory.error is None) is (status is Status.COMPLETED or said not in (None, "completed"))


async def test_an_unknown_status_is_refused(open_agent: OpenAgent) -> None:
    agent = await open_agent()
    assert (await agent.end(status="fine"))[0] == 400
    assert agent.world.gateway.stats().num_open_sessions == 1


async def test_an_ended_session_is_exported(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    reply = await agent.ask()
    await agent.reward(reward=1)
    await agent.end()
    status, answer = await agent.world.call("/export_trajectories", {"session_id": agent.id})
    assert status == 200
    assert answer["trajectory"]["rewards"]["final"] == 1.0
    assert answer["trajectory"]["turns"][0]["completions"][0]["id"] == reply.id
    (record,) = answer["records"]
    sampled = [
        token_id for token_id, is_sampled in zip(record["token_ids"], record["loss_mask"], strict=True) if is_sampled
    ]
    assert sampled == agent.world.ids("a<|im_end|>")


async def test_an_open_or_unknown_session_is_not_exported(open_agent: OpenAgent) -> None:
    agent = await open_agent()
    assert (await agent.world.call("/export_trajectories", {"session_id": agent.id}))[0] == 409
    assert (await agent.world.call("/export_trajectories", {"session_id": "nobody"}))[0] == 404


async def test_sessions_that_ended_long_ago_are_forgotten(open_world: OpenWorld) -> None:
    world = await open_world()
    _, first = await world.call("/rl/start_session", {"task_id": "t"})
    for _ in range(NUM_ENDED_KEPT + 1):
        _, session = await world.call("/rl/start_session", {"task_id": "t"})
        await world.call("/rl/end_session", {}, key=session["api_key"])
    assert (await world.call("/rl/set_reward", {"reward": 1}, key=first["api_key"]))[0] == 200  # it is open yet
    await world.call("/rl/end_session", {}, key=first["api_key"])
    assert (await world.call("/export_trajectories", {"session_id": first["session_id"]}))[0] == 200
    assert world.gateway.stats().num_open_sessions == 0


async def test_a_gateway_of_a_run_forms_its_groups_itself(open_world: OpenWorld) -> None:
    world = await open_world()
    status, answer = await world.call("/rl/start_session", {"task_id": "t", "group_size": 4})
    assert (status, answer["error"]["param"]) == (400, "group_size")
