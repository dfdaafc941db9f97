"""A train step on what an engine has sampled, and its weights pushed under a running answer: what a run does all day.

Its numbers are the run's own: how far the log-probabilities of engine and trainer are apart, what a push costs, and the
versions of an answer that new weights fell into.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.machine import gib
from areal_agent.doctor.sampling import Asker, told_spans
from areal_agent.doctor.stream import open_stream
from areal_agent.engine_types import DiskWeights, GenerateResult, PauseMode, Weights
from areal_agent.protocols import Engine
from areal_agent.trainer.reports import StepReport
from areal_agent.types import WeightVersion
from areal_agent.weights.push import PushReport, push

CLOSE = 1e-3
"""Nats between the log-probabilities of an engine and a trainer that both compute in float32."""
NEAR = 0.1
"""The same on average where one of them computes in bfloat16."""
FAR = 0.5
"""On average: they have not the same weights, or not the same temperature."""

NUM_TOKENS_AFTER = 4


class Publisher(Protocol):
    """A trainer, as far as a push needs it."""

    async def publish(self) -> Weights:
        """Its weights, where engines read them."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """What a push did, and the answer that it fell into."""

    report: PushReport
    published_s: float
    num_bytes: int
    answer: GenerateResult


def parity_finding(report: StepReport, *, is_float32: bool) -> Finding:
    """How far engine and trainer are apart on the same tokens under the same weights."""
    mean, most = report.metrics["logp_diff_mean"], report.metrics["logp_diff_max"]
    number = int(report.metrics["num_loss_tokens"])
    found = (
        f"the log-probabilities of engine and trainer (transformers) differ by {mean:.2g} nats on average and "
        f"{most:.2g} at most, over {number} tokens"
    )
    if not mean <= FAR:  # NaN, too
        return _finding(
            "parity", State.FAIL, found, "they do not compute the same model: compare its folders, and the temperature"
        )
    if most > CLOSE if is_float32 else mean > NEAR:
        return _finding("parity", State.WARN, found, "see that neither rounds more than it must (dtype, quantisation)")
    return _finding("parity", State.OK, found)


async def push_once(engine: Engine, trainer: Publisher, asker: Asker, version: WeightVersion) -> Pushed:
    """Publish the trainer's weights and push them into a running answer, as the paper does it.

    Raises EngineError and TrainerError.
    """
    started_s = time.perf_counter()
    weights = await trainer.publish()
    published_s = time.perf_counter() - started_s
    async with open_stream(engine, asker.long(1)) as stream:
        await stream.grows()
        report = await push([engine], weights, version, PauseMode.RETRACT)
        await stream.grows(beyond=stream.num_tokens + NUM_TOKENS_AFTER)
        answer = await stream.end()
    return Pushed(report=report, published_s=published_s, num_bytes=size_of(weights), answer=answer)


def push_findings(pushed: Pushed, transfer: str, old: WeightVersion) -> list[Finding]:
    """What it cost, and what the answer's tokens say."""
    report = pushed.report
    cost = (
        f"{gib(pushed.num_bytes)} by {transfer.replace('_', ' ')}: published in {pushed.published_s:.2f} s, taken in "
        f"{report.send_s:.2f} s while the engine sampled, answers held for {report.stall_s:.2f} s"
    )
    return [_finding("push", State.OK, cost), spans_finding(pushed.answer, old, report.version)]


def spans_finding(answer: GenerateResult, old: WeightVersion, new: WeightVersion) -> Finding:
    """Whether each token says which weights sampled it."""
    number = len(answer.token_ids)
    bounds = [(span.start, span.end) for span in answer.versions]
    versions = [span.version for span in answer.versions]
    starts = [0, *(end for _, end in bounds[:-1])]
    is_gapless = (
        [start for start, _ in bounds] == starts and bounds[-1:] == [(bounds[-1][0], number)] if bounds else False
    )
    found = f"an answer across the push has {told_spans(answer)}"
    if is_gapless and versions == [old, new]:
        return _finding("spans", State.OK, found)
    if is_gapless and versions == [old]:
        return _finding("spans", State.WARN, f"{found}: it ended before the new weights served, so nothing was seen")
    return _finding("spans", State.FAIL, f"{found}, where {old}, then {new} was to be seen", "see the engine's log")


def size_of(weights: Weights) -> int:
    """Of one set of weights on its way."""
    if isinstance(weights, DiskWeights):
        return sum(path.stat().st_size for path in Path(weights.path).iterdir())
    return sum(entry.num_bytes for entry in weights.entries)


def _finding(check: str, state: State, found: str, change: str = "") -> Finding:
    return Finding(check=check, state=state, found=found, change=change)
