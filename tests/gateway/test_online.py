"""A stand-alone gateway with its real ledger, and a trainer that leases from it by HTTP.

1. A lease has whole groups, the oldest first, and reads back exactly. 2. A repeated lease is the same, also from the
next process. 3. After the acknowledgement it is trained, and verified. 4. After a return it waits again. 5. At the
bound a start gets 429, siblings are admitted, and a published version makes room. 6. Failed sessions give their room
back. 7. Stale ones are dropped, counted, and give their room back. 8. A late reward is accepted until the lease, also
after a restart. 9. One that never comes is a missing reward. 10. A lease waits for enough groups and for stragglers.
11. A lease by trajectories takes whole groups. 12. Drops are idempotent, all or none. 13. Evaluations are never
leased. 14. Steps out of order and bad bodies are refused. 15. An end may be repeated; an export comes from the ledger.
16. A trajectory without a trainable token does not make a lease smaller. 17. A group keeps its size over a return and
a restart, a sibling that was cut off may come again, and a leased group accepts none until it is returned. 18. A
lease takes fewer groups when no further one would be admitted. 19. The status does not count groups that were given
up. 20. An agent that continues a session of an earlier process is told that it has ended. 21. With `train_roots: main`
only the main conversation is leased and trained, and the ledger is verified.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_agent.gateway.online.groups import Bound
from areal_agent.gateway.online.wire import decode_lease
from areal_agent.ledger.verify import verify
from areal_agent.tokens.records import token_records
from areal_agent.types import Drop, Fate, Status, Trajectory, WeightVersion

from .conftest import OpenWorld
from .online import GROUP_WAIT_S, Online, fate, ids, ids_of, open_online


@pytest.fixture
async def online(open_world: OpenWorld, tmp_path: Path) -> AsyncIterator[Online]:
    """A bound of two versions of four answers."""
    bound = Bound(batch_answers=4, max_staleness=1)
    online = await open_online(open_world, tmp_path / "ledger.sqlite", bound=bound)
    yield online
    await online.ledger.aclose()


def assert_equal(leased: Trajectory, kept: Trajectory) -> None:
    assert leased == kept
    for received, expected in zip(token_records(leased), token_records(kept), strict=True):
        for name in ("token_ids", "loss_mask", "turn_index", "behavior_logprobs", "temperatures", "versions"):
            ours, theirs = getattr(received, name), getattr(expected, name)
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)


async def test_a_lease_has_whole_groups_oldest_first_and_reads_back_exactly(online: Online) -> None:
    online.world.engine.version = WeightVersion(step=1)
    newer = await online.play("b", 2)
    online.world.engine.version = WeightVersion(incarnation=1, step=0)
    older = await online.play("a", 2)
    await online.done("publish", step=1)
    body = await online.done("lease", step=2, num_groups=2)
    reply = decode_lease(body)
    assert ids_of(reply) == [ids(older), ids(newer)]
    for trajectory in (one for group in reply.groups for one in group.trajectories):
        assert_equal(trajectory, await online.ledger.trajectory(trajectory.session_id))
    records = [record for group in reply.groups for one in group.trajectories for record in token_records(one)]
    for sent, ours in zip(body["records"], records, strict=True):
        assert np.array_equal(np.asarray(sent["behavior_logprobs"], dtype=np.float32), ours.behavior_logprobs)
        assert sent["token_ids"] == ours.token_ids.tolist()
    assert "records" not in await online.done("lease", step=2, num_groups=2, records=False)


async def test_a_lease_asked_for_again_is_the_same_also_by_the_next_process(online: Online) -> None:
    await online.play("a", 2)
    first = await online.lease(1)
    await online.play("b", 2)
    assert (await online.lease(1)).groups == first.groups
    await online.restart()
    assert (await online.lease(1)).groups == first.groups
    assert ids_of(await online.lease(2)) != ids_of(first)


async def test_what_is_acknowledged_is_trained(online: Online) -> None:
    (agent,) = await online.play("a")
    await online.lease(1)
    assert await fate(online, agent) is None
    for _ in range(2):
        await online.done("acknowledge", step=1, checkpoint="checkpoints/step_000001")
    assert await fate(online, agent) == Fate(trained_step=1)
    status, _ = await online.post("acknowledge", step=2, checkpoint="x")
    assert status == 409
    assert verify(online.path).violations == ()


async def test_what_is_returned_waits_again(online: Online) -> None:
    (agent,) = await online.play("a")
    await online.lease(1)
    assert (await online.done("return", after_step=0))["num_returned"] == 1
    assert (await online.done("return", after_step=0))["num_returned"] == 0
    state = (await online.done("status"))["state"]
    assert (state["num_finished"], state["leased"]) == (1, 0)
    assert ids_of(await online.lease(1)) == [[agent.id]]
    assert verify(online.path).violations == ()


async def test_the_bound_is_429_and_a_version_makes_room(online: Online) -> None:
    await online.play("a", 4)
    await online.world.start(group_id="b", group_size=4)
    async with online.world.http.post(
        f"{online.world.url}/rl/start_session",
        json={"task_id": "t", "group_id": "c"},
        headers={"Authorization": "Bearer sk-admin"},
    ) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert "4 answers run and 4 wait to be trained" in (await refused.json())["error"]["message"]
    for _ in range(3):
        await online.world.start(group_id="b", group_size=4)
    await online.lease(1)
    status, _ = await online.post("start_session", task_id="t", group_id="c", group_size=4)
    assert status == 429  # leased, and not yet a new version
    await online.done("publish", step=1)
    await online.world.start(group_id="c", group_size=4)


async def test_a_trainer_names_the_bound_and_the_next_process_knows_it(open_world: OpenWorld, tmp_path: Path) -> None:
    online = await open_online(open_world, tmp_path / "ledger.sqlite")
    assert (await online.done("status"))["state"]["capacity"] is None
    await online.done("publish", step=3, batch_answers=2, max_staleness=2)
    await online.restart()
    state = (await online.done("status"))["state"]
    assert (state["capacity"], state["published"], state["leased"]) == (6, 3, 3)


async def test_more_than_a_narrower_bound_admits_leaves_no_room_and_not_less(online: Online) -> None:
    await online.play("a", 8)
    state = (await online.done("publish", step=0, batch_answers=2, max_staleness=0))["state"]
    assert (state["num_finished"], state["capacity"]) == (8, 0)


async def test_what_failed_gives_its_room_back(online: Online) -> None:
    await online.play("a", 4, reward=None, status="error", error="it broke")
    await online.play("b", 4, reward=None, status="rejected")
    await online.play("c", 4)
    state = (await online.done("status"))["state"]
    assert (state["capacity"], state["drops"]) == (4, {"error": 4, "rejected": 4})
    assert state["statuses"] == {"error": 4, "rejected": 4, "completed": 4}


async def test_what_is_too_old_is_dropped_and_gives_its_room_back(online: Online) -> None:
    (old,) = await online.play("a")
    await online.done("publish", step=2)
    online.world.engine.version = WeightVersion(step=2)
    (new,) = await online.play("b")
    reply = await online.lease(3)
    assert ids_of(reply) == [[new.id]]
    assert await fate(online, old) == Fate(dropped=Drop.STALE)
    assert (reply.state.drops, reply.state.capacity) == ({"stale": 1}, 4)


async def test_a_reward_may_come_late_until_the_lease(online: Online) -> None:
    (agent,) = await online.play("a", reward=None)
    assert (await online.lease(1)).groups == ()
    await agent.reward(reward=0.5, name="style")
    assert (await online.lease(1)).groups == ()
    completion = (await online.ledger.trajectory(agent.id)).turns[0].completions[0].id
    await online.restart()
    agent.world = online.world
    assert await agent.reward(reward=True, interaction_id=completion) == (200, {"session_id": agent.id})
    status, answer = await agent.reward(reward=1, interaction_id="unknown")
    assert (status, answer["error"]["code"]) == (400, "interaction_not_found")
    (group,) = (await online.lease(1)).groups
    (trajectory,) = group.trajectories
    assert (trajectory.status, trajectory.rewards.total, trajectory.rewards.parts) == (
        Status.COMPLETED,
        1.0,
        {"style": 0.5},
    )
    status, answer = await agent.reward(reward=2)
    assert (status, answer["error"]["code"]) == (409, "reward_too_late")
    assert "leased for a train step" in answer["error"]["message"]
    await online.done("acknowledge", step=1, checkpoint="c")
    assert "trained(1)" in (await agent.reward(reward=2))[1]["error"]["message"]
    assert verify(online.path).violations == ()


async def test_a_reward_that_never_comes_is_missing(online: Online) -> None:
    (agent,) = await online.play("a", reward=None)
    online.clock.now_s = GROUP_WAIT_S - 1
    await online.lease(1)
    assert await fate(online, agent) is None
    online.clock.now_s = GROUP_WAIT_S
    await online.lease(1)
    assert await fate(online, agent) == Fate(dropped=Drop.MISSING_REWARD)
    status, answer = await agent.reward(reward=1)
    assert status == 409
    assert "dropped(missing_reward)" in answer["error"]["message"]


async def test_a_lease_waits_for_enough(online: Online) -> None:
    agent = await online.world.start()
    leasing = asyncio.create_task(online.lease(1, wait_s=600))
    await agent.play()
    assert ids_of(await leasing) == [[agent.id]]


async def test_a_lease_waits_for_stragglers_as_long_as_it_says(online: Online) -> None:
    straggler = await online.world.start()  # of version 0
    await straggler.post_chat()
    await online.done("publish", step=1)
    online.world.engine.version = WeightVersion(step=1)
    await online.play("b")
    assert (await online.lease(2, straggler_wait_s=10)).groups == ()  # the last batch that may use it
    online.clock.now_s = 9.0
    assert (await online.lease(2, straggler_wait_s=10)).groups == ()
    await straggler.reward(reward=1)
    await straggler.end()
    assert ids_of(await online.lease(2, straggler_wait_s=10)) == [[straggler.id]]
    second = await online.world.start()
    await second.post_chat()
    await online.done("publish", step=2)
    online.clock.now_s = 20.0
    assert (await online.lease(3, straggler_wait_s=10)).groups == ()
    online.clock.now_s = 30.0
    assert len((await online.lease(3, straggler_wait_s=10)).groups) == 1


async def test_by_trajectories_a_lease_takes_whole_groups(online: Online) -> None:
    await online.play("a", 2)
    await online.play("b", 2)
    assert (await online.lease(1, num_groups=None, num_trajectories=5)).groups == ()
    reply = await online.lease(1, num_groups=None, num_trajectories=3)
    assert [group.group_id for group in reply.groups] == ["a", "b"]


async def test_drops_are_idempotent_and_all_or_none(online: Online) -> None:
    first, second = await online.play("a", 2)
    status, _ = await online.post("drop", session_ids=[first.id, "unknown"], reason="filtered")
    assert (status, await fate(online, first)) == (409, None)
    for _ in range(2):
        await online.done("drop", session_ids=[first.id], reason="filtered")
    assert await fate(online, first) == Fate(dropped=Drop.FILTERED)
    assert ids_of(await online.lease(1)) == [[second.id]]
    status, answer = await online.post("drop", session_ids=[second.id], reason="filtered")
    assert (status, "leased for step 1" in answer["error"]["message"]) == (409, True)


async def test_evaluations_are_leased_to_nobody(online: Online) -> None:
    for _ in range(9):  # more than the bound admits
        agent = await online.world.start(purpose="eval")
        await agent.play()
    assert (await online.lease(1)).groups == ()
    assert (await online.done("status"))["state"]["capacity"] == 8


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("lease", {"step": 2, "num_groups": 1}, 409),
        ("lease", {"step": 0, "num_groups": 1}, 400),
        ("lease", {"step": 1}, 400),
        ("lease", {"step": 1, "num_groups": 1, "num_trajectories": 1}, 400),
        ("lease", {"step": 1, "num_groups": 1, "wait_s": -1}, 400),
        ("lease", {"step": 1, "num_groups": 1, "records": "yes"}, 400),
        ("publish", {"step": 1, "batch_answers": 4}, 400),
        ("publish", {"step": True}, 400),
        ("acknowledge", {"step": 1, "checkpoint": None}, 400),
        ("return", {}, 400),
        ("drop", {"session_ids": ["a"], "reason": "tired"}, 400),
        ("drop", {"session_ids": "a", "reason": "stale"}, 400),
        ("status", {"verbose": True}, 400),
        ("start_session", {"task_id": "t", "group_size": 0}, 400),
    ],
)
async def test_bad_calls_are_refused(online: Online, path: str, body: Any, status: int) -> None:
    received, answer = await online.world.call(f"/rl/{path}", body)
    assert (received, set(answer["error"])) == (status, {"message", "type", "param", "code"})


async def test_an_older_version_is_not_published(online: Online) -> None:
    await online.done("publish", step=2)
    status, answer = await online.post("publish", step=1)
    assert (status, "/rl/return" in answer["error"]["message"]) == (409, True)


async def test_a_trainers_calls_take_the_admin_key(online: Online) -> None:
    agent = await online.world.start()
    for path in ("publish", "lease", "acknowledge", "return", "drop", "status"):
        assert (await online.world.call(f"/rl/{path}", {}, key=agent.key))[0] == 403
        assert (await online.world.call(f"/rl/{path}", {}, key=None))[0] == 401


async def test_an_end_may_be_said_again(online: Online) -> None:
    (agent,) = await online.play("a")
    first = await agent.end(status="error")
    assert first == (200, first[1] | {"status": "completed", "num_turns": 1})
    await online.restart()
    agent.world = online.world
    assert await agent.end() == first


async def test_a_session_of_the_process_before_is_over(online: Online) -> None:
    """Not 401: its key is right, and an agent is to start anew, not to look for another key."""
    agent = await online.world.start()
    await online.restart()
    status, answer = await online.world.call("/v1/chat/completions", {}, key=agent.key)
    assert (status, answer["error"]["code"]) == (409, "session_ended")
    assert "has ended as orphan" in answer["error"]["message"]
    assert (await online.world.call("/v1/chat/completions", {}, key="sk-of-nobody"))[0] == 401


async def test_an_export_comes_from_the_ledger(online: Online) -> None:
    (agent,) = await online.play("a")
    running = await online.world.start()
    await online.lease(1)
    await online.done("acknowledge", step=1, checkpoint="c")
    await online.restart()
    status, exported = await online.world.call("/export_trajectories", {"session_id": agent.id})
    assert (status, exported["trajectory"]["fate"]["trained_step"]) == (200, 1)
    status, exported = await online.world.call("/export_trajectories", {"session_id": running.id})
    assert (status, exported["trajectory"]["status"]) == (200, "orphan")
    assert (await online.world.call("/export_trajectories", {"session_id": "unknown"}))[0] == 404


async def test_an_open_session_is_not_exported(online: Online) -> None:
    agent = await online.world.start()
    status, answer = await online.world.call("/export_trajectories", {"session_id": agent.id})
    assert (status, answer["error"]["code"]) == (409, "session_open")


async def test_a_returned_group_is_as_large_as_it_was(online: Online) -> None:
    await online.play("a", 2)
    await online.lease(1)
    await online.done("return", after_step=0)
    await require_full_group_of_two(online)
    await online.restart()
    await require_full_group_of_two(online)


async def require_full_group_of_two(online: Online) -> None:
    for size, refusal, told in ((50, 400, "was started with 2"), (2, 409, "has its 2 session(s) already")):
        status, answer = await online.post("start_session", task_id="t", group_id="a", group_size=size)
        assert (status, told in answer["error"]["message"]) == (refusal, True), answer
    assert (await online.done("status"))["state"]["capacity"] == 6


async def test_the_next_process_waits_for_a_sibling_that_was_cut_off(online: Online) -> None:
    ended, _ = [await online.world.start(group_id="a", group_size=3) for _ in range(2)]
    failed = await online.world.start(group_id="a", group_size=3)
    await ended.play()
    await failed.end(status="error")
    await online.restart()
    assert (await online.lease(1)).groups == ()
    replaced = await online.world.start(group_id="a", group_size=3)
    assert (await online.post("start_session", task_id="t", group_id="a", group_size=3))[0] == 409
    await replaced.play()
    assert ids_of(await online.lease(1)) == [ids([ended, replaced])]


async def test_a_leased_group_takes_no_sibling_until_it_is_returned(online: Online) -> None:
    first = await online.world.start(group_id="a", group_size=2)
    await first.play()
    online.clock.now_s = GROUP_WAIT_S
    assert ids_of(await online.lease(1)) == [[first.id]]
    await online.restart()
    status, answer = await online.post("start_session", task_id="t", group_id="a", group_size=2)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (409, "group_leased", "group_id")
    await online.done("return", after_step=0)
    sibling = await online.world.start(group_id="a", group_size=2)
    await sibling.play()
    assert ids_of(await online.lease(1)) == [ids([first, sibling])]


async def test_a_lease_takes_what_there_is_when_no_group_fits_beside_it(online: Online) -> None:
    agents = await online.play("a", 6)  # room for 2
    assert ids_of(await online.lease(1, num_groups=2)) == [ids(agents)]


async def test_a_lease_that_waits_ends_when_a_group_is_kept_out(online: Online) -> None:
    agents = await online.play("a", 2)
    assert (await online.lease(1, num_groups=2)).groups == ()
    leasing = asyncio.create_task(online.lease(1, num_groups=2, wait_s=600))
    while not leasing.done():
        status, _ = await online.post("start_session", task_id="t", group_id="b", group_size=8)
        assert status == 429
    assert ids_of(await leasing) == [ids(agents)]


async def test_the_status_counts_no_group_that_was_given_up(online: Online) -> None:
    agent = await online.world.start(group_id="a", group_size=4)
    await agent.end(status="error")
    assert (await online.done("status"))["state"]["capacity"] == 4
    online.clock.now_s = GROUP_WAIT_S
    assert (await online.done("status"))["state"]["capacity"] == 8


async def test_a_trajectory_without_a_trained_token_is_altered(online: Online) -> None:
    useless = await online.world.start(group_id="a")
    await useless.post_chat(temperature=0)
    await useless.reward(reward=1)
    await useless.end()
    (agent,) = await online.play("b")
    assert ids_of(await online.lease(1)) == [[agent.id]]
    assert await fate(online, useless) == Fate(dropped=Drop.ALTERED)


async def test_only_the_main_conversation_is_trained_where_that_is_asked_for(online: Online) -> None:
    agent = await online.world.start(group_id="a")
    await agent.ask("a title, please")
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        reply = await agent.ask(messages)
        messages += [reply.choices[0].message.to_dict(), {"role": "user", "content": "go on"}]
    await agent.reward(reward=1)
    await agent.end()
    body = await online.done("lease", step=1, num_groups=1, train_roots="main")
    trajectory = await online.ledger.trajectory(agent.id)
    title, *main = (one for turn in trajectory.turns for one in turn.completions)
    num_trained = sum(sum(record["loss_mask"]) for record in body["records"])
    assert num_trained == sum(len(one.token_ids) for one in main) > 0 < len(title.token_ids)
    await online.done("acknowledge", step=1, checkpoint="checkpoints/step_000001")
    report = verify(online.path)
    assert (report.violations, report.num_trained_tokens) == ((), num_trained)
