"""The pause of a push, and others who want the engine to go on:

- until it is committed, also while it is, nobody but its sender ends the pause; its commit and its abort give it up
- a sender that has been silent for the time-out holds nothing any more, and its push is no more; one that waits for the
  engine to come to rest is not silent
- a pause that is no step of a push is everybody's, as SGLang's is
- through a real server: who is not the sender is refused, the engine stays still, and what waits comes after the commit
"""

import asyncio
from collections.abc import Callable

import aiohttp
import pytest

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.pushes import Pushes
from areal_agent.engine.wire import control
from areal_agent.errors import EngineRejected, PushConflict
from areal_agent.types import DiskWeights, PauseMode, WeightVersion

NEW = WeightVersion(step=8)
OTHERS = pytest.mark.parametrize("other", [None, "another"])


class Model:
    """Its weights are swapped when a test says so."""

    def __init__(self) -> None:
        self.version = WeightVersion()
        self.is_swapping = asyncio.Event()
        self.may_swap = asyncio.Event()
        self.may_swap.set()

    async def take(self, weights: object) -> object:
        return weights

    async def holds(self, taken: object) -> bool:
        return False

    async def swap(self, taken: object, version: WeightVersion, *, flush_cache: bool) -> None:
        self.is_swapping.set()
        await self.may_swap.wait()
        self.version = version


async def paused(model: Model, timeout_s: float = 1e9) -> Pushes[object]:
    """A push of `sender`, ready to be committed."""
    pushes = Pushes(model, timeout_s=timeout_s)
    pushes.begin("sender")
    await pushes.send("sender", DiskWeights(path="any"))
    with pushes.hold("sender"):
        pass  # it is at rest at once
    return pushes


@OTHERS
async def test_nobody_else_ends_it(other: str | None) -> None:
    pushes = await paused(Model())
    with pytest.raises(PushConflict, match="'sender' is open and holds the engine paused"):
        pushes.let_go(other)
    pushes.let_go("sender")
    pushes.let_go(other)


@OTHERS
async def test_nor_while_it_is_committed(other: str | None) -> None:
    model = Model()
    pushes = await paused(model)
    model.may_swap.clear()
    commit = asyncio.create_task(pushes.commit("sender", NEW, flush_cache=True))
    await model.is_swapping.wait()
    with pytest.raises(PushConflict, match="'sender' is being committed"):
        pushes.let_go(other)
    pushes.let_go("sender")
    model.may_swap.set()
    await commit
    pushes.let_go(other)


async def commit(pushes: Pushes[object]) -> None:
    await pushes.commit("sender", NEW, flush_cache=True)


async def abort(pushes: Pushes[object]) -> None:
    pushes.abort("sender")


async def begin_again(pushes: Pushes[object]) -> None:
    pushes.begin("sender")


@pytest.mark.parametrize("end", [commit, abort, begin_again])
async def test_its_end_gives_it_up(end: Callable) -> None:
    pushes = await paused(Model())
    await end(pushes)
    pushes.let_go(None)


async def test_a_silent_sender_holds_nothing() -> None:
    pushes = await paused(Model(), timeout_s=0)
    pushes.let_go(None)
    with pytest.raises(PushConflict, match="is not open"):
        await commit(pushes)


async def test_a_sender_that_waits_for_the_engine_to_rest_is_not_silent() -> None:
    pushes = await paused(Model(), timeout_s=0)
    with pushes.hold("sender"), pytest.raises(PushConflict, match="holds the engine paused"):
        pushes.let_go(None)
    await commit(pushes)


async def test_who_is_not_open_holds_nothing() -> None:
    pushes = await paused(Model())
    pushes.let_go("sender")
    with pushes.hold("another"):
        pushes.let_go(None)


async def test_a_pause_of_no_push_is_everybodys(tiny, serve, ask) -> None:
    async with serve(tiny) as served, aiohttp.ClientSession(served.engine.base_url) as session:
        await served.engine.begin_push("p")
        stranger = HttpEngine(served.engine.base_url)
        await stranger.pause(PauseMode.RETRACT)
        await served.engine.resume()
        await served.engine.abort_push("p")
        await served.engine.pause(PauseMode.RETRACT)
        async with session.post(control.CONTINUE_GENERATION) as answer:  # without a body, as SGLang takes it
            assert answer.status == 200
        assert len((await stranger.generate(ask(1))).token_ids) == 12
        await stranger.aclose()


async def test_a_server_stays_still_until_the_commit(tiny, other, serve, ask, share) -> None:
    async with serve(tiny) as served:
        stranger = HttpEngine(served.engine.base_url)
        await served.engine.begin_push("p")
        await served.engine.send_push("p", share(other))
        await served.engine.pause(PauseMode.RETRACT)
        waiting = asyncio.create_task(stranger.generate(ask(1)))
        await served.until(lambda stats: stats.num_queued == 1)
        with pytest.raises(EngineRejected, match="409: push 'p' is open and holds the engine paused"):
            await stranger.resume()
        assert (await served.engine.stats()).generated_tokens == 0
        await served.engine.commit_push("p", NEW)
        await served.engine.resume()
        assert {span.version for span in (await waiting).versions} == {NEW}
        await stranger.aclose()
