"""In whatever order senders call, the weights that serve are one push, sent and committed as a whole:

- a version never goes back, and only a commit changes it; a step that fails changes nothing
- an abort of the open push always makes room for the next one
"""

import asyncio
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.pushes import Pushes
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DiskWeights, SharedMemoryWeights, WeightVersion

SENDERS = st.sampled_from(["a", "b"])
STEPS = st.one_of(
    st.tuples(st.just("begin"), SENDERS),
    st.tuples(st.just("send"), SENDERS, st.sampled_from(["good", "better", "bad"])),
    st.tuples(st.just("commit"), SENDERS, st.integers(0, 4)),
    st.tuples(st.just("abort"), SENDERS),
)


@dataclass
class Model:
    """A push target that takes any weights but `bad` ones, and records what serves."""

    version: WeightVersion
    serving: str = "initial"

    async def take(self, weights: SharedMemoryWeights | DiskWeights) -> str:
        await asyncio.sleep(0)
        if weights.path == "bad":
            raise WeightUpdateError("damaged")
        return weights.path

    async def holds(self, taken: str) -> bool:
        return taken == self.serving

    async def swap(self, taken: str, version: WeightVersion, *, flush_cache: bool) -> None:
        self.serving, self.version = taken, version


async def take_step(pushes: Pushes[str], step: tuple) -> bool:
    """Return whether the step was accepted."""
    try:
        match step:
            case ("begin", sender):
                pushes.begin(sender)
            case ("send", sender, weights):
                await pushes.send(sender, DiskWeights(path=weights))
            case ("commit", sender, version):
                await pushes.commit(sender, WeightVersion(step=version), flush_cache=True)
            case ("abort", sender):
                pushes.abort(sender)
    except WeightUpdateError:
        return False
    return True


@given(st.lists(STEPS, max_size=30))
def test_what_serves_was_sent_and_committed_whole(steps):
    async def run() -> None:
        model = Model(WeightVersion(step=1))
        pushes = Pushes(model)
        sent: dict[str, str] = {}
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
        for sender in ("a", "b"):
            pushes.abort(sender)
        later = model.version.step + 1
        for step in (("begin", "c"), ("send", "c", "last"), ("commit", "c", later)):
            assert await take_step(pushes, step)
        assert (model.version.step, model.serving) == (later, "last")

    asyncio.run(run())
