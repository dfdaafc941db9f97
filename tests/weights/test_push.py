"""Pushing weights into engines, with the scripted engine.

- A transfer that fails, at whichever engine, stops nobody: all serve the old version, and the next push works.
- A failed commit leaves the old version serving; the error names the engine; the others have the new version.
- A failed pause updates nobody. A failed resume is told. All engines resume in every case, cancellation included.
- Nobody is paused while weights are being sent.
- The report's parts add up.
"""

import asyncio
from contextlib import closing

import pytest
import torch

from areal_agent.engine.fake import FakeEngine, Operation
from areal_agent.errors import EngineUnreachable, WeightUpdateError
from areal_agent.types import (
    DiskWeights,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SamplingParams,
    VersionSpan,
    WeightVersion,
)
from areal_agent.weights.channels import DiskChannel, SharedMemoryChannel, layout
from areal_agent.weights.push import push

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
WEIGHTS = DiskWeights(path="unused")


def engines(number: int = 2) -> list[FakeEngine]:
    return [FakeEngine([[11, 12, 13, 14]], version=OLD, is_stepped=True) for _ in range(number)]


async def begin(engine: FakeEngine) -> asyncio.Future[GenerateResult]:
    """A request in flight, of which two tokens have been sampled."""
    request = GenerateRequest(request_id="r1", input_ids=(1,), sampling=SamplingParams(max_tokens=8))
    answer = asyncio.ensure_future(engine.generate(request))
    await engine.wait_for_requests(1)
    engine.step(2)
    return answer


async def test_the_mode_is_passed_on():
    (engine,) = engines(1)
    answer = await begin(engine)
    await push([engine], WEIGHTS, NEW, PauseMode.ABORT)
    assert (await answer).token_ids == (11, 12)


async def test_a_failed_commit_names_the_engine_and_leaves_the_old_version_serving():
    good, bad = engines()
    bad.fail_next(Operation.COMMIT_PUSH, WeightUpdateError("no memory"))
    answer = await begin(bad)
    with pytest.raises(WeightUpdateError, match=r"version 0:8 .* engine 1: commit failed: no memory"):
        await push([good, bad], WEIGHTS, NEW)
    assert (good.version, bad.version) == (NEW, OLD)
    assert good.paused is None
    bad.step(2)
    assert (await answer).versions == (VersionSpan(version=OLD, start=0, end=4),)


@pytest.mark.parametrize("operation", [Operation.BEGIN_PUSH, Operation.SEND_PUSH])
async def test_a_failed_transfer_stops_nobody_and_the_next_push_works(operation):
    good, bad = engines()
    bad.fail_next(operation, EngineUnreachable("no answer"))
    for engine in (good, bad):
        engine.fail_next(Operation.PAUSE, AssertionError("nobody is paused before all weights are there"))
    with pytest.raises(WeightUpdateError, match=r"engine 1: \w+ failed: no answer"):
        await push([good, bad], WEIGHTS, NEW)
    assert (good.version, bad.version) == (OLD, OLD)
    for engine in (good, bad):
        with pytest.raises(AssertionError):
            await engine.pause(PauseMode.RETRACT)
    await push([good, bad], WEIGHTS, NEW)
    assert (good.version, bad.version) == (NEW, NEW)


@pytest.mark.parametrize(
    ("make", "damage"),
    [
        (lambda folder: SharedMemoryChannel(folder, layout([("norm", torch.ones(5))], torch.float32)), "checksum"),
        (lambda folder: DiskChannel(folder, torch.float32), "SHA-256"),
    ],
)
async def test_damaged_weights_are_found_by_their_digests(make, damage, tmp_path):
    (engine,) = engines(1)
    engine.corrupt_next_push()
    with closing(make(tmp_path)) as channel:
        weights = channel.write({"norm": torch.ones(5)})
        with pytest.raises(WeightUpdateError, match=f"engine 0: send failed: .* {damage}"):
            await push([engine], weights, NEW)
        assert (engine.version, engine.weights) == (OLD, [])
        await push([engine], weights, NEW)
        assert (engine.version, engine.weights) == (NEW, [weights])


@pytest.mark.parametrize(("operation", "served"), [(Operation.PAUSE, OLD), (Operation.RESUME, NEW)])
async def test_a_failed_pause_or_resume_is_told_and_the_others_resume(operation, served):
    good, bad = engines()
    bad.fail_next(operation, EngineUnreachable("no answer"))
    with pytest.raises(WeightUpdateError, match=f"engine 1: {operation} failed: no answer"):
        await push([good, bad], WEIGHTS, NEW)
    assert [one.version for one in (good, bad)] == [served, served]
    assert good.paused is None


async def test_an_error_that_is_not_an_engines_is_raised_as_it_is_after_the_resume():
    (engine,) = engines(1)
    engine.fail_next(Operation.COMMIT_PUSH, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        await push([engine], WEIGHTS, NEW)
    assert engine.paused is None


async def test_a_cancelled_push_resumes():
    (engine,) = engines(1)
    engine.hang_next(Operation.COMMIT_PUSH)
    pushing = asyncio.ensure_future(push([engine], WEIGHTS, NEW))
    while engine.paused is None:  # noqa: ASYNC110 (it tells nobody)
        await asyncio.sleep(0)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert engine.paused is None


async def test_the_parts_of_the_report_add_up():
    report = await push(engines(), WEIGHTS, NEW)
    assert report.version == NEW
    assert report.stall_s == pytest.approx(report.pause_s + report.transfer_s + report.resume_s)
