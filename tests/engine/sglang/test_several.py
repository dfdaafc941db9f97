"""Several servers as one engine: where requests go, and what happens to all of them at once.

- a prompt goes where its beginning is cached, unless that server has too much to do; without one, to the idlest
- the longer of two known beginnings decides; memory is bounded
- a push reaches all and writes its folder once; one that fails fails the push, and all go on
- requests are spread, an abort finds its request, the engine's numbers are sums and least common limits
- servers with different models are refused
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.sglang.fleet import Fleet
from areal_agent.engine.sglang.routing import BLOCK_TOKENS, Router
from areal_agent.errors import EngineRejected, WeightUpdateError
from areal_agent.types import FinishReason, WeightVersion
from areal_agent.weights.push import push

from .conftest import Watched

NEW = WeightVersion(step=8)


def prompt(number: int, num_tokens: int = 3 * BLOCK_TOKENS) -> list[int]:
    return [number] * num_tokens


def test_the_next_turn_goes_where_the_one_before_went():
    router = Router()
    home = router.choose(prompt(1), [1, 0, 1])
    assert home == 1
    assert router.choose([*prompt(1), 7, 8], [0, 3, 0]) == home
    assert router.choose(prompt(2), [0, 3, 1]) == 0


def test_a_server_with_too_much_to_do_is_left_and_its_prompt_moves():
    router = Router(max_lead=2)
    assert router.choose(prompt(1), [0, 1]) == 0
    assert router.choose(prompt(1), [3, 0]) == 1
    assert router.choose(prompt(1), [0, 2]) == 1


def test_the_deepest_beginning_decides():
    router = Router()
    router.choose(prompt(1), [0, 1])
    router.choose([*prompt(1), *prompt(2)], [9, 0])
    assert router.choose([*prompt(1), *prompt(2), 5], [0, 0]) == 1


@given(st.lists(st.lists(st.integers(0, 3), max_size=4 * BLOCK_TOKENS), max_size=20), st.integers(1, 8))
def test_it_remembers_a_bounded_number_of_blocks_and_always_chooses_a_server(prompts, num_servers):
    router = Router(max_keys=5)
    loads = [0] * num_servers
    for one in prompts:
        loads[router.choose(one, loads)] += 1
    assert sum(loads) == len(prompts) and len(router._home_of) <= 5


class Servers:
    """Two embedded engines behind one client."""

    def __init__(self, fleet: Fleet, served: list) -> None:
        self.fleet = fleet
        self.served = served


@pytest.fixture
async def two(serve, tiny) -> AsyncGenerator[Servers]:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serve(tiny)) for _ in range(2)]
        fleet = Fleet.of([one.engine.base_url for one in served])
        stack.push_async_callback(fleet.aclose)
        await fleet.wait_ready(60.0)
        yield Servers(fleet, served)


async def test_requests_are_spread(two, ask):
    answers = [asyncio.ensure_future(two.fleet.generate(ask(n, max_tokens=4))) for n in range(6)]
    await asyncio.sleep(0)  # all have begun
    assert [server.num_requests for server in two.fleet.servers] == [3, 3]
    assert {len(answer.token_ids) for answer in await asyncio.gather(*answers)} == {4}


async def test_an_abort_finds_its_request(two, ask):
    requests = [ask(n, max_tokens=480) for n in range(2)]
    watched = [Watched(two.fleet, request) for request in requests]
    for request, one in zip(requests, watched, strict=True):
        await one.until(1)
        await two.fleet.abort(request.request_id)
    assert {(await one.answer).finish_reason for one in watched} == {FinishReason.ABORT}


async def test_a_push_reaches_all_and_is_written_once(two, ask, share, other):
    weights = share(other)
    await push([two.fleet], weights, NEW)
    assert len(list((Path(weights.path).parent / "folders").iterdir())) == 1
    assert {(await server.info()).weight_version for server in two.fleet.servers} == {NEW}
    assert (await two.fleet.info()).weight_version == NEW


async def test_a_push_that_one_server_cannot_take_fails_and_all_go_on(two, ask, share, other):
    await two.served[1].server.aclose()
    with pytest.raises(WeightUpdateError):
        await push([two.fleet], share(other), NEW)
    assert len((await two.fleet.servers[0].generate(ask(1))).token_ids) == 12


async def test_servers_with_different_models_are_refused(serve, tiny, make_model):
    async with serve(tiny) as one, serve(make_model(vocab_size=101)) as other:
        fleet = Fleet.of([one.engine.base_url, other.engine.base_url])
        with pytest.raises(EngineRejected, match="different models"):
            await fleet.info()
        await fleet.aclose()
