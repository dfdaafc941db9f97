"""Pushes of weights into an engine, in whatever order senders call, and the pause that a push holds:

- the weights that serve are one push, sent and committed as a whole; a version never goes back, and only a commit
  changes it; a step that fails changes nothing; an abort of the open push always makes room for the next one
- until it is committed, also while it is, nobody but its sender ends the pause; its commit and its abort give it up
- a sender that has been silent for the time-out holds nothing any more, and its push is no more; one that waits for the
  engine to come to rest is not silent
- a pause that is no step of a push is everybody's, as SGLang's is
- through a real server: who is not the sender is refused, the engine stays still, and what waits comes after the commit
"""

import asyncio

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.pushes import Pushes
from areal_agent.engine.wire import control
from areal_agent.errors import EngineRejected, PushConflict, WeightUpdateError
from areal_agent.types import DiskWeights, PauseMode, SharedMemoryWeights, WeightVersion

NEW = WeightVersion(step=8)
SENDERS = st.sampled_from(["a", "b"])
STEPS = st.one_of(
    st.tuples(st.just("begin"), SENDERS),
    st.tuples(st.just("send"), SENDERS, st.sampled_from(["good", "better", "bad"])),
    st.tuples(st.just("hold"), SENDERS),
    st.tuples(st.just("let go"), SENDERS | st.none()),
    st.tuples(st.just("commit"), SENDERS, st.integers(0, 4)),
    st.tuples(st.just("abort"), SENDERS),
)


class Model:
    """A push target that takes any weights but `bad` ones, and swaps them when a test says so."""

    def __init__(self, step: int = 0) -> None:
        self.version = WeightVersion(step=step)
        self.serving = "initial"
        self.is_swapping = asyncio.Event()
        self.may_swap = asyncio.Event()
        self.may_swap.set()

    async def take(self, weights: SharedMemoryWeights | DiskWeights) -> str:
        await asyncio.sleep(0)
        if weights.path == "bad":
            raise WeightUpdateError("damaged")
        return weights.path

    async def holds(self, taken: str) -> bool:
        return taken == self.serving

    async def swap(self, taken: str, version: WeightVersion, *, flush_cache: bool) -> None:
        self.is_swapping.set()
        await self.may_swap.wait()
        self.serving, self.version = taken, version


async def take_step(pushes: Pushes[str], step: tuple) -> bool:
    """Return whether the step was accepted."""
    try:
        match step:
            case ("begin", sender):
                pushes.begin(sender)
            case ("send", sender, weights):
                await pushes.send(sender, DiskWeights(path=weights))
            case ("hold", sender):
                with pushes.hold(sender):
                    pass  # the engine is at rest at once
            case ("let go", who):
                pushes.let_go(who)
            case ("commit", sender, version):
                await pushes.commit(sender, WeightVersion(step=version), flush_cache=True)
            case ("abort", sender):
                pushes.abort(sender)
    except WeightUpdateError:
        return False
    return True


@given(st.lists(STEPS, max_size=30))
def test_what_serves_was_sent_and_committed_whole_and_only_its_sender_ends_its_pause(steps):
    async def run() -> None:
        model = Model(step=1)
        pushes = Pushes(model)
        sent: dict[str, str] = {}
        opened, is_sent, is_held = None, False, False  # the push that is open
        for step in steps:
            before = (model.version, model.serving)
            is_accepted = await take_step(pushes, step)
            if is_accepted and step[0] == "commit":
                assert (model.version.step, model.serving) == (step[2], sent.pop(step[1]))
                assert model.version >= before[0]
            else:
                assert (model.version, model.serving) == before
            if is_accepted and step[0] == "send":
                sent[step[1]] = step[2]
            match step:
                case ("begin", who) if is_accepted:
                    opened, is_sent, is_held = who, False, False
                case ("send", who, weights) if who == opened and not is_sent:
                    opened, is_sent = (None, False) if weights == "bad" else (who, True)
                case ("commit", who, _) if who == opened and is_sent:
                    opened = None
                case ("abort", who) if who == opened:
                    opened = None
                case ("hold", who) if who == opened:
                    is_held = True
                case ("let go", who):
                    assert is_accepted == (opened is None or not is_held or who == opened)
                    is_held = is_held and who != opened
        for sender in ("a", "b"):
            pushes.abort(sender)
        pushes.let_go(None)
        later = model.version.step + 1
        for step in (("begin", "c"), ("send", "c", "last"), ("commit", "c", later)):
            assert await take_step(pushes, step)
        assert (model.version.step, model.serving) == (later, "last")

    asyncio.run(run())


async def paused(model: Model, timeout_s: float = 1e9) -> Pushes[str]:
    """A push of `sender`, ready to be committed."""
    pushes = Pushes(model, timeout_s=timeout_s)
    for step in (("begin", "sender"), ("send", "sender", "any"), ("hold", "sender")):
        assert await take_step(pushes, step)
    return pushes


@pytest.mark.parametrize("other", [None, "another"])
async def test_nobody_else_ends_the_pause_while_it_is_committed(other: str | None) -> None:
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


async def test_a_silent_sender_holds_nothing() -> None:
    pushes = await paused(Model(), timeout_s=0)
    pushes.let_go(None)
    with pytest.raises(PushConflict, match="is not open"):
        await pushes.commit("sender", NEW, flush_cache=True)


async def test_a_sender_that_waits_for_the_engine_to_rest_is_not_silent() -> None:
    pushes = await paused(Model(), timeout_s=0)
    with pushes.hold("sender"), pytest.raises(PushConflict, match="holds the engine paused"):
        pushes.let_go(None)
    await pushes.commit("sender", NEW, flush_cache=True)


async def test_a_pause_of_no_push_is_everybodys(served, ask) -> None:
    async with aiohttp.ClientSession(served.engine.base_url) as session:
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


async def test_a_server_stays_still_until_the_commit(other, served, ask, share) -> None:
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
