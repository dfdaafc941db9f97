"""Which trainer may train from a gateway, and what it may undo.

1. A call of another trainer is refused with the remedy. 2. Nothing that a checkpoint has trained is undone unasked. 3.
A trainer that takes over keeps what others trained, begins after it, and gets what waits. 4. The one before is then
refused, and may take over again. 5. All this survives a restart of the gateway. 6. A trainer that lost its own
checkpoint trains its rollouts again, and nothing that others trained. 7. Whatever trainers do, the ledger verifies. 8.
Rollouts of another trainer's weights are stale, whatever their label; those of a trainer's own earlier weights count
by their step, also after a restart of both.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal_agent.gateway.online.groups import Bound
from areal_agent.ledger.verify import verify
from areal_agent.types import Fate, WeightVersion

from .conftest import Agent, OpenWorld
from .online import Online, fate, ids_of, open_online


@pytest.fixture
async def online(open_world: OpenWorld, tmp_path: Path) -> AsyncIterator[Online]:
    online = await open_online(open_world, tmp_path / "ledger.sqlite", bound=Bound(batch_answers=4, max_staleness=1))
    yield online
    await online.ledger.aclose()


async def train(
    online: Online, step: int, trainer: str | None, *, commits: bool = True, sampled_by: int | None = None
) -> Agent:
    """Run a whole train step of one rollout, sampled by the weights of the step before or of `sampled_by`."""
    online.world.engine.version = WeightVersion(step=step - 1 if sampled_by is None else sampled_by)
    (agent,) = await online.play(f"{trainer}-{step}")
    reply = await online.lease(step, trainer=trainer)
    assert ids_of(reply) == [[agent.id]]
    await online.done("publish", step=step, trainer=trainer)
    if commits:
        await online.done("acknowledge", step=step, trainer=trainer, checkpoint=f"{trainer}/{step}")
    return agent


async def fates(online: Online, *agents: Agent) -> list[Fate | None]:
    return [await fate(online, agent) for agent in agents]


@pytest.mark.parametrize("stranger", ["b", None])
async def test_a_call_of_another_trainer_is_refused(online: Online, stranger: str | None) -> None:
    agent = await train(online, 1, "a")
    for path, body in {
        "publish": {"step": 2},
        "lease": {"step": 2, "num_groups": 1},
        "acknowledge": {"step": 1, "checkpoint": "c"},
        "return": {"after_step": 1},
        "drop": {"session_ids": [agent.id], "reason": "filtered"},
    }.items():
        status, answer = await online.post(path, trainer=stranger, **body)
        assert (status, answer["error"]["code"]) == (409, "other_trainer"), path
        assert "belongs to trainer 'a'" in answer["error"]["message"] and '"adopt": true' in answer["error"]["message"]
    state = (await online.done("status"))["state"]
    assert (state["trainer"], state["published"], await fate(online, agent)) == ("a", 1, Fate(trained_step=1))


async def test_nothing_committed_is_undone_unasked(online: Online) -> None:
    agents = [await train(online, step, None) for step in (1, 2)]
    status, answer = await online.post("return", after_step=0)
    assert (status, answer["error"]["code"]) == (409, "would_undo")
    assert "the checkpoint of step 2 is acknowledged" in answer["error"]["message"]
    assert await fates(online, *agents) == [Fate(trained_step=1), Fate(trained_step=2)]


async def test_who_takes_over_keeps_what_was_trained_and_has_what_waits(online: Online) -> None:
    first = await train(online, 1, "a")
    leased = await train(online, 2, "a", commits=False, sampled_by=0)
    returned = await online.done("return", after_step=0, trainer="b", adopt=True)
    assert returned["num_returned"] == 1
    state = returned["state"]
    assert (state["trainer"], state["published"], state["num_finished"], state["capacity"]) == ("b", 0, 1, 7)
    assert ids_of(await online.lease(1, trainer="b")) == [[leased.id]]
    assert ids_of(await online.lease(1, trainer="b")) == [[leased.id]]
    await online.done("publish", step=1, trainer="b")
    await online.done("acknowledge", step=1, trainer="b", checkpoint="b/1")
    assert await fates(online, first, leased) == [Fate(trained_step=1), Fate(trained_step=2)]
    assert verify(online.path).violations == ()


async def test_the_trainer_before_is_refused_and_may_take_over_in_its_turn(online: Online) -> None:
    first = await train(online, 1, "a")
    for _ in range(2):  # an answer was lost
        await online.done("return", after_step=0, trainer="b", adopt=True)
    second = await train(online, 1, "b")
    assert (await online.post("publish", step=2, trainer="a"))[0] == 409
    await online.done("return", after_step=1, trainer="a", adopt=True)
    third = await train(online, 2, "a")
    trained = await fates(online, first, second, third)
    assert trained == [Fate(trained_step=1), Fate(trained_step=2), Fate(trained_step=3)]
    assert verify(online.path).violations == ()


async def test_the_next_process_knows_whose_steps_they_are(online: Online) -> None:
    first = await train(online, 1, "a")
    await online.done("return", after_step=0, trainer="b", adopt=True)
    second = await train(online, 1, "b")
    await online.restart()
    assert (await online.post("publish", step=2, trainer="a"))[0] == 409
    third = await train(online, 2, "b")
    assert await fates(online, first, second, third) == [Fate(trained_step=step) for step in (1, 2, 3)]
    assert verify(online.path).violations == ()


async def test_a_lost_checkpoint_is_trained_again_and_nothing_of_others(online: Online) -> None:
    others = await train(online, 1, "a")
    await online.done("return", after_step=5, trainer="b", adopt=True)
    await online.done("publish", step=5, trainer="b", incarnation=0)
    kept, lost = await train(online, 6, "b"), await train(online, 7, "b")
    assert (await online.post("return", after_step=6, trainer="b"))[0] == 409
    returned = await online.done("return", after_step=6, trainer="b", adopt=True)
    assert returned["num_returned"] == 1
    assert await fates(online, others, lost) == [Fate(trained_step=1), None]
    assert (await fate(online, kept)) is not None
    await online.done("return", after_step=0, trainer="b", adopt=True)
    await online.done("publish", step=0, trainer="b", incarnation=1)
    assert await fates(online, others, kept, lost) == [Fate(trained_step=1), None, None]
    reply = await online.lease(1, trainer="b", num_groups=2)
    assert sorted(ids_of(reply)) == sorted([[kept.id], [lost.id]])
    await online.done("acknowledge", step=1, trainer="b", checkpoint="b/1")
    assert verify(online.path).violations == ()


async def lease_after_take_over(online: Online, version: WeightVersion) -> list[list[str]]:
    """Return what trainer b leases at its step 1, as incarnation 1, of a rollout sampled by weights of `version`."""
    await train(online, 1, "a")
    online.world.engine.version = version
    await online.play("played")
    await online.done("return", after_step=0, trainer="b", adopt=True)
    await online.done("publish", step=0, trainer="b", incarnation=1)
    return ids_of(await online.lease(1, trainer="b"))


async def test_what_another_trainers_weights_sampled_is_stale(online: Online) -> None:
    assert await lease_after_take_over(online, WeightVersion(incarnation=0, step=7)) == []
    assert (await online.done("status"))["state"]["drops"] == {"stale": 1}


async def test_a_label_that_happens_to_fit_is_no_fresher(online: Online) -> None:
    assert await lease_after_take_over(online, WeightVersion(incarnation=0, step=0)) == []


async def test_what_its_own_weights_sampled_is_leased(online: Online) -> None:
    (group,) = await lease_after_take_over(online, WeightVersion(incarnation=1, step=0))
    assert len(group) == 1


async def test_a_trainer_that_resumed_loses_none_of_its_own(online: Online) -> None:
    await online.done("publish", step=0, trainer="a", incarnation=0)
    first = await train(online, 1, "a")
    online.world.engine.version = WeightVersion(step=1)  # of a step that no checkpoint holds any more
    (waits,) = await online.play("waits")
    await online.done("return", after_step=0, trainer="a", adopt=True)
    await online.restart()
    await online.done("publish", step=0, trainer="a", incarnation=1)
    reply = await online.lease(1, trainer="a", num_groups=2)
    assert sorted(ids_of(reply)) == sorted([[first.id], [waits.id]])
