"""Weights by torch.distributed, into the schedulers of a real SGLang server (slow):

- an answer goes on during the send, and under the new weights after the commit; spans say from which token on
- weights that are damaged, of another model, or whose trainer is gone change nothing, and the next ones work
- they serve when sent again and again, and after a folder was loaded; a folder may be loaded after them
"""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from areal_agent.engine.sglang.server import SglangServer
from areal_agent.errors import WeightUpdateError
from areal_agent.types import PauseMode, WeightVersion
from areal_agent.weights.push import push

from ..sampled import Weights, assert_sampled_by, assert_swapped
from ..transfers import FAULTS, Channels, open_channel, parameters_of
from .conftest import Stage, Watched, open_stage

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(real_server: str, real_model: Path, real_other: Path) -> AbstractAsyncContextManager[Stage]:
    """The embedded engine receives them through its own client."""
    return open_stage(SglangServer(real_server), real_model, real_other, num_long=1000)


@pytest.fixture
def channel(stage: Stage) -> Iterator[Channels]:
    with open_channel(stage.model, timeout_s=20.0) as channel:
        yield channel


async def test_an_answer_goes_on_while_they_are_sent_and_under_them(stage, channel, ask, truth):
    first, second = (ask(number, max_tokens=stage.num_long) for number in (1, 2))
    early = Watched(stage.engine, first)
    await early.until(5)
    await stage.send(channel.write(parameters_of(stage.other)))
    was_over = early.answer.done()  # a server's first transfer takes its time
    late = Watched(stage.engine, second)
    await late.until(5)
    await stage.swap(PauseMode.RETRACT)
    if was_over:
        assert_sampled_by(stage.before, first, await early.answer, truth)
    assert_swapped(stage.before, stage.after, second, await late.answer, truth)
    await early.answer


async def serves(stage, folder: Path, version: WeightVersion, ask, truth) -> None:
    request = ask(2, max_tokens=10)
    answer = await stage.engine.generate(request)
    assert_sampled_by(Weights(model=folder, version=version), request, answer, truth)


async def test_what_is_wrong_changes_nothing(stage, channel, ask, truth):
    weights = channel.write(parameters_of(stage.other))
    for fault in FAULTS:
        with pytest.raises(WeightUpdateError):
            await stage.push(fault(weights))
        await serves(stage, stage.model, stage.old, ask, truth)
    await stage.push(weights)
    await serves(stage, stage.other, stage.new, ask, truth)


async def test_they_may_come_again_and_again_and_between_folders(stage, channel, ask, truth):
    version = stage.old
    for folder in (stage.other, stage.model, stage.other):
        version = WeightVersion(step=version.step + 1)
        await push([stage.engine], channel.write(parameters_of(folder)), version)
        await serves(stage, folder, version, ask, truth)
    version = WeightVersion(step=version.step + 1)
    await stage.engine.load(stage.model, version)
    await serves(stage, stage.model, version, ask, truth)
    version = WeightVersion(step=version.step + 1)
    await push([stage.engine], channel.write(parameters_of(stage.other)), version)
    await serves(stage, stage.other, version, ask, truth)
