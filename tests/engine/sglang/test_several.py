"""Several servers as one engine, over the client for SGLang's servers: their shared folders and numbers.

- requests are spread, an abort finds its request, the engine's numbers are sums and common minimums
- a push reaches all and writes its folder once; a server that missed it gets the same folder, not written again
- folders that a departed server used are no longer kept for it
- servers with different models are refused
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from areal_agent.engine.address import EngineAddress
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberState
from areal_agent.errors import EngineRejected
from areal_agent.types import FinishReason, WeightVersion
from areal_agent.weights.push import push

from .conftest import DEADLINE_S, Watched

NEW = WeightVersion(step=8)


def fleet_of(*served) -> Fleet:
    return EngineAddress(backend="sglang", urls=tuple(one.engine.base_url for one in served)).connect()


class Servers:
    """Two embedded engines behind one client."""

    def __init__(self, fleet: Fleet, served: list) -> None:
        self.fleet = fleet
        self.served = served

    async def versions(self) -> list[WeightVersion]:
        return [(await one.engine.info()).weight_version for one in self.served]


@pytest.fixture
async def two(serve, tiny) -> AsyncGenerator[Servers]:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serve(tiny)) for _ in range(2)]
        fleet = fleet_of(*served)
        stack.push_async_callback(fleet.aclose)
        await fleet.wait_ready(DEADLINE_S)
        yield Servers(fleet, served)


async def test_requests_are_spread(two, ask):
    watched = [Watched(two.fleet, ask(n, max_tokens=400)) for n in range(6)]
    for one in watched:
        await one.until(1)
    assert [one.num_requests for one in two.fleet.report()] == [3, 3]
    assert {len((await one.answer).token_ids) for one in watched} == {400}


async def test_an_abort_finds_its_request(two, ask):
    requests = [ask(n, max_tokens=480) for n in range(2)]
    watched = [Watched(two.fleet, request) for request in requests]
    for request, one in zip(requests, watched, strict=True):
        await one.until(1)
        await two.fleet.abort(request.request_id)
    assert {(await one.answer).finish_reason for one in watched} == {FinishReason.ABORT}


async def test_a_push_reaches_all_and_is_written_once(two, share, other):
    weights = share(other)
    await push([two.fleet], weights, NEW)
    assert len(list((Path(weights.path).parent / "folders").iterdir())) == 1
    assert await two.versions() == [NEW, NEW]
    assert (await two.fleet.info()).weight_version == NEW


async def test_one_that_missed_a_push_is_given_the_same_folder(two, serve, tiny, share, other):
    weights = share(other)
    await push([two.fleet], weights, NEW)
    await asyncio.to_thread(Path(weights.path).write_bytes, b"the next weights are being written here")
    async with serve(tiny) as late:
        await two.fleet.add(late.engine.base_url)
        assert (await late.engine.info()).weight_version == NEW
        assert len(list((Path(weights.path).parent / "folders").iterdir())) == 1
        assert [one.state for one in two.fleet.report()] == [MemberState.SERVING] * 3


async def test_a_server_that_left_keeps_no_folder(two, share, other):
    weights = share(other)
    await push([two.fleet], weights, NEW)
    await two.fleet.remove(two.served[0].engine.base_url)
    await push([two.fleet], weights, WeightVersion(step=9))
    assert len(list((Path(weights.path).parent / "folders").iterdir())) == 1


async def test_servers_with_different_models_are_refused(serve, tiny, make_model):
    async with serve(tiny) as one, serve(make_model(vocab_size=101)) as other:
        fleet = fleet_of(one, other)
        with pytest.raises(EngineRejected, match="different models"):
            await fleet.info()
        await fleet.aclose()
