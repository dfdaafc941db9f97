"""What the doctor says of an engine and of a push, with scripted engines.

- answers that can be recorded pass; each broken promise is named
- an answer that is paused, and goes on, passes; one that goes on within the pause fails; one that ended is a warning
- a push into a running answer shows the versions of its tokens; an answer that ended before is a warning
- spans with a gap, or in the wrong order, fail
- log-probabilities that are far apart fail, and near ones pass, by what the sides compute in
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areal_agent.doctor.findings import State
from areal_agent.doctor.trial import (
    Asker,
    batch_of,
    interruption_findings,
    parity_finding,
    push_findings,
    sample,
    sampling_finding,
    spans_finding,
)
from areal_agent.engine.fake import FakeEngine, Garbage
from areal_agent.trainer.wire import StepReport
from areal_agent.types import (
    DiskWeights,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    VersionSpan,
    WeightVersion,
)
from areal_agent.weights.channels import DiskChannel

OLD, NEW = WeightVersion(), WeightVersion(step=1)
LONG = tuple(range(10, 2010))


def asker(engine: FakeEngine) -> Asker:
    return Asker(prompt_ids=(1, 2, 3), stop_token_ids=(4,), temperature=1.0, info=engine.info())


def long_script(request: GenerateRequest) -> tuple[int, ...]:
    return LONG


class Sampling(FakeEngine):
    """Samples a token every few milliseconds, and none while it is paused."""

    def __init__(self) -> None:
        super().__init__(long_script, is_stepped=True, version=OLD)

    async def _announce(self) -> None:
        await super()._announce()
        self._sample()

    def _sample(self) -> None:
        self.step()
        if self.num_in_flight:
            asyncio.get_running_loop().call_later(0.005, self._sample)


class Leaking(Sampling):
    """Says that it is paused, and goes on."""

    async def pause(self, mode: PauseMode) -> None:
        pass


async def test_answers_that_can_be_recorded_pass() -> None:
    engine = FakeEngine([(11, 12, 4), (13, 4)], version=OLD)
    answers = await sample(engine, asker(engine))
    finding = sampling_finding(answers, engine.info())
    assert finding.state is State.OK and "5 of them" in finding.found
    batch = batch_of(answers)
    assert [int(record.loss_mask.sum()) for record in batch.records] == [3, 2]
    assert [one.rewards.final for one in batch.trained] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (Garbage.ID_OUTSIDE, "not those of the answer"),
        (Garbage.LOGPROB_MISSING, "1 log-probabilities for 2 tokens"),
        (Garbage.LOGPROB_NAN, "or one that is not a log-probability"),
        (Garbage.VERSIONS_MISSING, "labelled not at all"),
    ],
)
async def test_a_broken_promise_is_named(garbage: Garbage, message: str) -> None:
    engine = FakeEngine([(11, 4)], version=OLD)
    engine.garble_next(garbage)
    finding = sampling_finding(await sample(engine, asker(engine), 1), engine.info())
    assert finding.state is State.FAIL and message in finding.found


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (Sampling, State.OK, "and went on"),
        (Leaking, State.FAIL, "during a pause"),
        (lambda: FakeEngine(long_script, version=OLD), State.WARN, "had ended before"),
    ],
)
async def test_a_pause(make: Callable[[], FakeEngine], state: State, message: str) -> None:
    engine = make()
    (finding,) = await interruption_findings(engine, asker(engine))
    assert finding.state is state and message in finding.found


@pytest.mark.parametrize(
    ("make", "state"), [(Sampling, State.OK), (lambda: FakeEngine(long_script, version=OLD), State.WARN)]
)
async def test_a_push_into_a_running_answer(make: Callable[[], FakeEngine], state: State, tmp_path: Path) -> None:
    engine = make()
    channel = DiskChannel(tmp_path, torch.float32)

    async def publish() -> DiskWeights:
        return channel.write({"weight": torch.zeros(5)})

    cost, spans = await push_findings(engine, publish, asker(engine), "disk")
    assert (cost.state, spans.state) == (State.OK, state)
    assert "0 MiB by disk" in cost.found
    assert engine.version == NEW


@pytest.mark.parametrize(
    ("spans", "state"),
    [
        ([(OLD, 0, 2), (NEW, 2, 4)], State.OK),
        ([(OLD, 0, 4)], State.WARN),
        ([(NEW, 0, 4)], State.FAIL),
        ([(OLD, 0, 2), (NEW, 3, 4)], State.FAIL),
        ([(NEW, 0, 2), (OLD, 2, 4)], State.FAIL),
        ([(OLD, 0, 2), (NEW, 2, 3)], State.FAIL),
        ([], State.FAIL),
    ],
)
def test_spans(spans: list[tuple[WeightVersion, int, int]], state: State) -> None:
    answer = GenerateResult(
        token_ids=(1, 2, 3, 4),
        logprobs=(-1.0,) * 4,
        versions=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans),
        finish_reason=FinishReason.ABORT,
    )
    assert spans_finding(answer, OLD, NEW).state is state


@pytest.mark.parametrize(
    ("mean", "most", "is_float32", "state"),
    [
        (1e-6, 1e-5, True, State.OK),
        (1e-3, 1e-2, True, State.WARN),
        (1e-2, 0.4, False, State.OK),
        (0.2, 2.0, False, State.WARN),
        (3.0, 9.0, False, State.FAIL),
        (float("nan"), float("nan"), True, State.FAIL),
    ],
)
def test_parity(mean: float, most: float, is_float32: bool, state: State) -> None:
    metrics = {"logp_diff_mean": mean, "logp_diff_max": most, "num_loss_tokens": 8.0, "effective_sample_size": 0.9876}
    finding = parity_finding(StepReport(step=1, metrics=metrics, seconds=0.1), is_float32=is_float32)
    assert (finding.state, "importance weights is 0.988" in finding.found) == (state, True)
