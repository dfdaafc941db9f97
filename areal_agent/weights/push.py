"""Pushing a new weight version to engines while they work, and measuring what that costs.

    begin all ──▶ send all ──▶ pause all ──▶ commit all ──▶ resume all
    |◀─────── send_s ───────▶|◀ pause_s ▶|◀ transfer_s ▶|◀ resume_s ▶|
       the old version works |◀──────────────── stall_s ────────────▶|

No engine is paused before every engine has received and verified all weights, so a failed transfer stops nothing and
leaves all engines at the old version. Every push ends with resume, and a failed one with abort as well.

The policy (`engine.on_push`) says what happens to answers in progress:

    interrupt       they stop at a token, and continue under the new weights
    turn_boundary   they finish under the old weights; the turns after them wait for the new weights
    drain           whole rollouts finish under the old weights; rollouts after them start under the new weights
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

from areal_agent.errors import EngineError, EnginesGone, WeightUpdateError
from areal_agent.process import uninterrupted
from areal_agent.protocols import WeightReceiver
from areal_agent.types import DeviceWeights, PauseMode, Weights, WeightVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """The cost of one push in seconds. `stall_s` is the time from the first pause to the last resume."""

    version: WeightVersion
    send_s: float
    pause_s: float
    transfer_s: float
    resume_s: float
    stall_s: float


async def push(
    receivers: Sequence[WeightReceiver],
    weights: Weights,
    version: WeightVersion,
    mode: PauseMode = PauseMode.RETRACT,
    *,
    push_id: str | None = None,
) -> PushReport:
    """Swap the weights of all receivers at once, each at a token boundary.

    A repeated push has the same id and replaces what a receiver still holds of the first attempt.

    Raises WeightUpdateError naming each receiver that failed, at which step and how; the others serve `version` if the
    commit was reached. Raises EnginesGone if every receiver that failed was gone; the push may then be repeated. All
    receivers have been told to resume by then, even when this call is cancelled.
    """
    push_id = push_id or secrets.token_hex(8)
    started_s = time.perf_counter()
    try:
        failures = await _failures("begin", [receiver.begin_push(push_id) for receiver in receivers])
        failures = failures or await _failures("send", [receiver.send_push(push_id, weights) for receiver in receivers])
        sent_s = time.perf_counter()
        if failures:
            raise _failed(version, receivers, failures)
        return await _swap(receivers, push_id, version, mode, started_s=started_s, sent_s=sent_s)
    except BaseException:
        # If this fails too, the receiver is gone, or it forgets the push when the next one begins.
        await uninterrupted(_failures("abort", [receiver.abort_push(push_id) for receiver in receivers]))
        raise


async def _swap(
    receivers: Sequence[WeightReceiver],
    push_id: str,
    version: WeightVersion,
    mode: PauseMode,
    *,
    started_s: float,
    sent_s: float,
) -> PushReport:
    paused_s = committed_s = sent_s
    failures: list[WeightUpdateError] = []
    try:
        failures += await _failures("pause", [receiver.pause(mode) for receiver in receivers])
        paused_s = committed_s = time.perf_counter()
        if not failures:
            failures += await _failures("commit", [receiver.commit_push(push_id, version) for receiver in receivers])
            committed_s = time.perf_counter()
    finally:
        failures += await uninterrupted(_failures("resume", [receiver.resume() for receiver in receivers]))
    resumed_s = time.perf_counter()
    if failures:
        raise _failed(version, receivers, failures)
    return PushReport(
        version=version,
        send_s=sent_s - started_s,
        pause_s=paused_s - sent_s,
        transfer_s=committed_s - paused_s,
        resume_s=resumed_s - committed_s,
        stall_s=resumed_s - sent_s,
    )


def _failed(
    version: WeightVersion, receivers: Sequence[WeightReceiver], failures: Sequence[WeightUpdateError]
) -> WeightUpdateError:
    kind = EnginesGone if all(isinstance(failure, EnginesGone) for failure in failures) else WeightUpdateError
    return kind(f"the push of version {version} to {len(receivers)} engine(s): {'; '.join(map(str, failures))}")


async def _failures(what: str, calls: Sequence[Coroutine[Any, Any, None]]) -> list[WeightUpdateError]:
    """Await all calls, one for each receiver, and return which failed. Errors other than EngineError are raised."""
    failures: list[WeightUpdateError] = []
    for index, result in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        if isinstance(result, EngineError):
            kind = EnginesGone if isinstance(result, EnginesGone) else WeightUpdateError
            failures.append(kind(f"engine {index}: {what} failed: {result}"))
        elif result is not None:
            raise result
    return failures


async def publish_and_push(
    publish: Callable[[bool], Awaitable[Weights]], push: Callable[[Weights], Awaitable[PushReport]]
) -> PushReport:
    """Push what `publish(False)` gives. If engines cannot take weights from a GPU's memory, push `publish(True)`.

    That goes through the host's memory, and so does all that the trainer publishes later.
    """
    weights = await publish(False)
    try:
        return await push(weights)
    except EnginesGone:
        raise
    except WeightUpdateError as error:
        if not isinstance(weights, DeviceWeights):
            raise
        logger.warning("new weights go through the host's memory from now on: %s", error)
    return await push(await publish(True))


MAX_ATTEMPTS = 3
"""The number of attempts at a push whose engines are gone in the middle of it. Limited, because the push may kill them.
"""

OnPush = Literal["interrupt", "turn_boundary", "drain"]


async def push_under(
    policy: OnPush,
    receivers: Sequence[WeightReceiver],
    weights: Weights,
    version: WeightVersion,
    *,
    drained: Callable[[], AbstractAsyncContextManager[None]],
) -> PushReport:
    """Push with `push`, and repeat it if the engines are gone in the middle of it, as they may be restarted.

    Inside `drained()` no rollout is running, and none starts.
    """
    async with drained() if policy == "drain" else contextlib.nullcontext():
        mode = PauseMode.RETRACT if policy == "interrupt" else PauseMode.WAIT
        push_id = secrets.token_hex(8)
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(EnginesGone):
                return await push(receivers, weights, version, mode, push_id=push_id)
        return await push(receivers, weights, version, mode, push_id=push_id)
