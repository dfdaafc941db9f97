"""New weights for a server, in front of the embedded engine and (slow) of a real SGLang server:

- retract: tokens after the swap are the new model's, and the spans say from which token on
- in place: requests go on with their old keys and values; spans say which weights sampled; nothing is refused
- wait: what has begun ends on the old version first; requests that have not begun are not waited for
- a push that is damaged, or that does not fit the model, changes nothing, and the next one works
- weights are loaded only while paused, with a later version than the serving one
"""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from areal_agent.errors import PushConflict, WeightUpdateError
from areal_agent.types import PauseMode, VersionSpan
from areal_agent.weights.channels import DiskChannel

from ..sampled import assert_sampled_by, assert_swapped
from ..test_pushes import DISK_FAULTS, with_tensors
from ..transfers import parameters_of
from .conftest import Watched, until_one_waits

NORM = "model.norm.weight"


@pytest.fixture(params=["shared_memory", "disk"])
def new_weights(request, stage, share, tmp_path):
    """The weights of `stage.other`, as the trainer hands them over."""
    if request.param == "shared_memory":
        return share(stage.other)
    return DiskChannel(tmp_path / "weights", torch.float32).write(parameters_of(stage.other))


async def test_after_a_swap_the_new_model_goes_on(stage, ask, truth, new_weights):
    request = ask(1, max_tokens=stage.num_long)
    await stage.send(new_weights)
    watched = Watched(stage.engine, request)
    await watched.until(5)
    await stage.swap(PauseMode.RETRACT)
    result = await watched.answer
    assert_swapped(stage.before, stage.after, request, result, truth)
    assert (await stage.engine.info()).weight_version == stage.new
    fresh = ask(2, max_tokens=10)
    assert_sampled_by(stage.after, fresh, await stage.engine.generate(fresh), truth)


async def test_a_request_that_was_frozen_goes_on_under_the_new_version(stage, ask, new_weights):
    await stage.send(new_weights)
    watched = Watched(stage.engine, ask(3, max_tokens=stage.num_long))
    await watched.until(5)
    await stage.swap(PauseMode.IN_PLACE)
    result = await watched.answer
    assert [span.version for span in result.versions] == [stage.old, stage.new]
    assert result.versions[-1].end == stage.num_long


async def test_what_has_begun_ends_first_and_what_comes_then_waits(stage, ask, share):
    await stage.send(share(stage.other))
    begun = Watched(stage.engine, ask(4, max_tokens=stage.num_long))
    await begun.until(1)
    pausing = asyncio.ensure_future(stage.engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    late = Watched(stage.engine, ask(5, max_tokens=5))
    assert (await begun.answer).versions == (VersionSpan(version=stage.old, start=0, end=stage.num_long),)
    await pausing
    assert not late.token_ids
    await stage.engine.commit_push("p", stage.new)
    await stage.engine.resume()
    assert (await late.answer).versions == (VersionSpan(version=stage.new, start=0, end=5),)


async def test_a_request_that_waits_here_can_be_aborted(stage, ask):
    await stage.engine.pause(PauseMode.WAIT)
    waiting = Watched(stage.engine, ask(6))
    await until_one_waits(stage.engine)
    await stage.engine.abort(ask(6).request_id)
    assert (await waiting.answer).token_ids == ()
    await stage.engine.resume()


async def test_a_pause_does_not_wait_for_requests_that_wait_here(stage, ask):
    await stage.engine.pause(PauseMode.WAIT)
    waiting = Watched(stage.engine, ask(6))
    await until_one_waits(stage.engine)
    await stage.engine.pause(PauseMode.WAIT)
    await stage.engine.resume()
    assert len((await waiting.answer).token_ids) == 12


FAULTS = {name: spoil for name, (spoil, _) in DISK_FAULTS.items() if name != "infinity"} | {
    "an extra tensor": lambda weights: with_tensors(weights, lambda tensors: tensors.update(extra=torch.zeros(3))),
    "another shape": lambda weights: with_tensors(weights, lambda tensors: tensors.update({NORM: torch.zeros(3)})),
    "gone": lambda weights: shutil.rmtree(weights.path),
}


async def test_weights_that_are_damaged_or_do_not_fit_change_nothing(stage, ask, share, tmp_path):
    channel, parameters = DiskChannel(tmp_path / "weights", torch.float32), parameters_of(stage.other)
    request, good = ask(7, temperature=0.0), share(stage.other)
    before = await stage.engine.generate(request)
    with pytest.raises(WeightUpdateError, match="checksum"):
        await stage.push(dataclasses.replace(good, crc32=good.crc32 ^ 1))
    for fault, spoil in FAULTS.items():
        spoil(weights := channel.write(parameters))
        with pytest.raises(WeightUpdateError):
            await stage.push(weights)
        after = await stage.engine.generate(request)
        assert (after.token_ids, after.versions) == (before.token_ids, before.versions), fault
    await stage.push(good)
    assert (await stage.engine.generate(request)).versions[-1].version == stage.new


async def test_weights_are_loaded_only_while_it_is_paused(stage, share):
    await stage.engine.begin_push("p")
    await stage.engine.send_push("p", share(stage.other))
    with pytest.raises(WeightUpdateError, match="not paused"):
        await stage.engine.commit_push("p", stage.new)
    await stage.engine.abort_push("p")
    with pytest.raises(PushConflict, match="not open"):
        await stage.engine.send_push("p", share(stage.other))


async def test_versions_only_go_up(stage, share):
    await stage.engine.begin_push("p")
    await stage.engine.send_push("p", share(stage.other))
    await stage.engine.pause(PauseMode.RETRACT)
    with pytest.raises(WeightUpdateError, match="not later"):
        await stage.engine.commit_push("p", stage.old)
    await stage.engine.resume()
    assert (await stage.engine.info()).weight_version == stage.old


async def test_folders_go_when_nobody_needs_them(stage, share):
    weights = share(stage.other)
    folders = Path(weights.path).parent / "folders"
    await stage.engine.begin_push("p")
    await stage.engine.send_push("p", weights)
    assert [path.name for path in folders.iterdir()] == ["p"]
    await stage.engine.abort_push("p")
    assert list(folders.iterdir()) == []
