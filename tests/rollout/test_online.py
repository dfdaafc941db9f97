"""The trainer's client of a gateway that stands alone.

1. a batch is exactly what the gateway's ledger has; 2. a lease of too few is none; 3. publish, lease, return,
acknowledge and drop do what they say; 4. a gateway that is gone for a while costs time and nothing else; 5. one that
stays away, or refuses, is an error that says so; 6. status reads back; 7. a gateway of another
trainer's is refused, unless it is adopted.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest

from areal_agent.errors import GatewayError
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.server import ServedGateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.online import OnlineGateway
from areal_agent.tokens.records import token_records
from areal_agent.types import Drop, Fate, TokenRecord
from tests.run.online_gateway import KEY, open_online_side, play_rewarded


@dataclass(kw_only=True)
class World:
    gateway: Gateway
    served: ServedGateway
    ledger: Ledger
    client: OnlineGateway

    async def play(self, group_id: str) -> str:
        return await play_rewarded(self.served, group_id, stop="7", n=2)


@pytest.fixture
async def world(small_model: Path, tmp_path: Path) -> AsyncIterator[World]:
    async with open_online_side(small_model, tmp_path / "ledger.sqlite", "The answer is 2.<|im_end|>") as side:
        client = OnlineGateway(side.served.base_url, KEY)
        yield World(gateway=side.gateway, served=side.served, ledger=side.ledger, client=client)
        await client.aclose()


async def test_a_batch_is_exactly_what_the_ledger_has(world: World) -> None:
    ids = sorted([await world.play("a"), await world.play("b")])
    batch, state = await world.client.lease(1, num_groups=2)
    assert batch is not None
    assert (batch.step, state.leased) == (1, 1)
    kept = [await world.ledger.trajectory(session_id) for session_id in ids]
    assert sorted((one for group in batch.groups for one in group.trajectories), key=lambda one: one.session_id) == kept
    by_session = {one.session_id: token_records(one) for one in kept}
    records = [record for group in batch.groups for one in group.trajectories for record in by_session[one.session_id]]
    assert len(batch.records) == len(records) > 0
    for received, expected in zip(batch.records, records, strict=True):
        for field in fields(TokenRecord):
            ours, theirs = getattr(received, field.name), getattr(expected, field.name)
            assert np.array_equal(ours, theirs) and getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)
    assert {one.dtype for one in (batch.records[0].token_ids, batch.records[0].behavior_logprobs)} == {
        np.dtype(np.int32),
        np.dtype(np.float32),
    }


async def test_a_lease_of_too_few_is_none(world: World) -> None:
    await world.play("a")
    batch, state = await world.client.lease(1, num_groups=2)
    assert (batch, state.num_finished) == (None, 1)
    assert (await world.client.lease(1, num_trajectories=1))[0] is not None


async def test_the_whole_life_of_a_lease(world: World) -> None:
    first, second = await world.play("a"), await world.play("b")
    state = await world.client.publish(0, batch_answers=4, max_staleness=1)
    assert state.capacity == 6
    await world.client.drop([first], Drop.FILTERED)
    await world.client.lease(1, num_groups=1)
    assert await world.client.give_back(0) == 1
    await world.client.lease(1, num_groups=1)
    await world.client.publish(1)
    await world.client.acknowledge(1, "checkpoints/step_000001")
    fates = [(await world.ledger.trajectory(one)).fate for one in (first, second)]
    assert fates == [Fate(dropped=Drop.FILTERED), Fate(trained_step=1)]


async def test_another_trainer_is_refused_until_it_adopts(world: World) -> None:
    session = await world.play("a")
    await world.client.lease(1, num_groups=1)
    await world.client.acknowledge(1, "checkpoints/step_000001")
    other = OnlineGateway(world.served.base_url, KEY, trainer="run-b")
    with pytest.raises(
        GatewayError, match="answered with 409: this gateway belongs to a nameless trainer, not to trainer 'run-b"
    ):
        await other.publish(1)
    assert await other.give_back(0, adopt=True) == 0
    assert (await other.publish(0)).trainer == "run-b"
    assert (await world.ledger.trajectory(session)).fate == Fate(trained_step=1)
    await other.aclose()


async def test_a_gateway_that_is_gone_for_a_while_costs_time_alone(world: World) -> None:
    await world.play("a")
    port = int(world.served.base_url.rpartition(":")[2])
    await world.served.aclose()
    leasing = asyncio.create_task(world.client.lease(1, num_groups=1))
    await asyncio.wait({leasing}, timeout=0.05)
    assert not leasing.done()
    again = await world.gateway.serve("127.0.0.1", port)
    batch, _ = await leasing
    assert batch is not None
    await again.aclose()


async def test_a_gateway_that_stays_away_is_an_error(world: World) -> None:
    await world.served.aclose()
    impatient = OnlineGateway(world.served.base_url, KEY, patience_s=0.0)
    with pytest.raises(GatewayError, match=r"has not answered for 0 s: .*; start it again on its ledger"):
        await impatient.publish(1)
    with pytest.raises(GatewayError, match=r"no gateway answers at .*; start one with python -m areal_agent\.gateway"):
        await impatient.check()
    await impatient.aclose()


async def test_a_refusal_is_an_error_with_its_reason(world: World) -> None:
    with pytest.raises(GatewayError, match="answered with 409: step 5 cannot be leased for; the next is 1"):
        await world.client.lease(5, num_groups=1)
    stranger = OnlineGateway(world.served.base_url, "sk-wrong")
    with pytest.raises(GatewayError, match="answered with 401"):
        await stranger.check()
    await stranger.aclose()


async def test_status_reads_back(world: World) -> None:
    await world.play("a")
    with pytest.raises(GatewayError):
        await world.client.lease(9, num_groups=1)
    status = await world.client.status()
    assert (status.stats.turns, status.stats.errors) == (1, {409: 1})
    assert status.stats.generated_tokens == world.gateway.stats().generated_tokens
    assert (status.state.num_finished, status.state.statuses) == (1, {"completed": 1})
