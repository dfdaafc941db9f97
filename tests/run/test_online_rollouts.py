"""A run's side of a gateway that stands alone, against a real one.

1. a run has one name at gateways, whenever it is resumed; 2. a new run undoes nothing of the one before, and says in
one line what it found; 3. it says nothing of a gateway of its own; 4. a batch that does not come while nobody plays is
told once, with the numbers.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.engine.client import HttpEngine
from areal_agent.gateway.server import ServedGateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.online import OnlineGateway
from areal_agent.run.sources import OnlineRollouts, take_over, trainer_name
from areal_agent.types import WeightVersion
from tests.run.online_gateway import KEY, open_online_side


@pytest.fixture
async def served(small_model: Path, tmp_path: Path) -> AsyncIterator[ServedGateway]:
    async with open_online_side(small_model, tmp_path / "gateway.sqlite", "2<|im_end|>") as side:
        yield side.served


async def publish_as(served: ServedGateway, trainer: str, step: int) -> None:
    """What another run has left behind."""
    client = OnlineGateway(served.base_url, KEY, trainer=trainer)
    await client.publish(step)
    await client.aclose()


async def test_a_run_has_one_name_whenever_it_is_resumed(tmp_path: Path) -> None:
    names: list[str] = []
    for run in ("a", "a", "b"):
        ledger = await Ledger.open(tmp_path / run, create=True)
        names.append(await trainer_name(ledger))
        await ledger.aclose()
    assert names[0] == names[1] != names[2]


async def test_a_new_run_says_what_it_found(served: ServedGateway, caplog: pytest.LogCaptureFixture) -> None:
    await publish_as(served, "run-a", 7)
    client = OnlineGateway(served.base_url, KEY, trainer="run-b")
    await take_over(client, "run-b", 0)
    state = (await client.status()).state
    await client.aclose()
    assert (state.trainer, state.published) == ("run-b", 0)
    (line,) = caplog.messages
    assert "trainer run-a up to step 7: what was trained stays trained" in line


async def test_a_resumed_run_has_nothing_to_say(served: ServedGateway, caplog: pytest.LogCaptureFixture) -> None:
    await publish_as(served, "run-a", 7)
    client = OnlineGateway(served.base_url, KEY, trainer="run-a")
    await take_over(client, "run-a", 7)
    await client.aclose()
    assert caplog.messages == []


async def test_a_batch_that_does_not_come_is_told_once(served: ServedGateway) -> None:
    told = asyncio.Queue[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.put_nowait(record.getMessage())

    values = {"batch_size": 2, "group_size": 4, "max_staleness": 0, "engine": {"url": "http://127.0.0.1:1"}}
    config = Config.parse(values | {"rollout": {"gateway_url": served.base_url}})
    client = OnlineGateway(served.base_url, KEY, trainer="run-a")
    rollouts = OnlineRollouts(
        config=config, engine=HttpEngine("http://127.0.0.1:1"), gateway=client, step=0, lease_wait_s=0.0
    )
    await rollouts.publish(WeightVersion())
    listener = Listener()
    logging.getLogger("areal_agent.run.sources").addHandler(listener)
    taking = asyncio.create_task(rollouts.take(1))
    line = await told.get()
    for _ in range(3):  # the run asks on meanwhile
        await client.status()
    taking.cancel()
    await asyncio.wait({taking})
    logging.getLogger("areal_agent.run.sources").removeHandler(listener)
    await client.aclose()
    await rollouts.engine.aclose()
    assert "0 answers wait there, and 8 more may start; a step takes 2 groups of 4" in line
    assert told.empty()
