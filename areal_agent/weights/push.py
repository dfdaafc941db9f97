"""Gives a new weight version to engines in the middle of their work, and measures what that costs.

    begin all ──▶ send all ──▶ pause all ──▶ commit all ──▶ resume all
    |◀─────── send_s ───────▶|◀ pause_s ▶|◀ transfer_s ▶|◀ resume_s ▶|
       the old version works |◀──────────────── stall_s ────────────▶|

Nobody is paused before every receiver has taken and proved all weights: a transfer that fails stops nobody, and no
receiver has the new version then. Resume comes always, and so does an abort where the push has failed.
It knows receivers by their protocol alone, and nothing of how weights are stored.

What new weights do to answers under way: the three policies of `engine.on_push`.

    interrupt       they stop at a token, and go on under the new weights
    turn_boundary   they end under the old ones; the turns after them wait, and begin under the new ones
    drain           whole rollouts end under the old ones; those after them begin under the new ones

It knows rollouts only as something that can be drained.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

from areal_agent.errors import EngineError, EnginesGone, WeightUpdateError
from areal_agent.protocols import WeightReceiver
from areal_agent.types import PauseMode, Weights, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """What one push cost, in seconds; `stall_s` is the time from the first pause to the last resume."""

    version: WeightVersion
    send_s: float
    pause_s: float
    transfer_s: float
    resume_s: float
    stall_s: float


def new_push_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """Of one receiver at one step."""

    text: str
    is_gone: bool


async def push(
    receivers: Sequence[WeightReceiver],
    weights: Weights,
    version: WeightVersion,
    mode: PauseMode = PauseMode.RETRACT,
    *,
    push_id: str | None = None,
) -> PushReport:
    """Swap the weights of all receivers at once, each at a token boundary.

    One that is made again has the id of before: it takes the place of what a receiver has left of that.

    Raises WeightUpdateError naming each receiver that failed, at which step and how; the others serve `version` if the
    commit was reached. EnginesGone when each that failed was gone: then it may be made again. Every receiver has been
    told to resume by then, also when this call is cancelled.
    """
    push_id = push_id or new_push_id()
    started_s = time.perf_counter()
    try:
        failures = await _failures("begin", [receiver.begin_push(push_id) for receiver in receivers])
        failures = failures or await _failures("send", [receiver.send_push(push_id, weights) for receiver in receivers])
        sent_s = time.perf_counter()
        if failures:
            raise _failed(version, receivers, failures)
        return await _swap(receivers, push_id, version, mode, started_s=started_s, sent_s=sent_s)
    except BaseException:
        # Where this fails too, the receiver is gone, or forgets the push when another one begins.
        await _to_the_end(_failures("abort", [receiver.abort_push(push_id) for receiver in receivers]))
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
    failures: list[_Failure] = []
    try:
        failures += await _failures("pause", [receiver.pause(mode) for receiver in receivers])
        paused_s = committed_s = time.perf_counter()
        if not failures:
            failures += await _failures("commit", [receiver.commit_push(push_id, version) for receiver in receivers])
            committed_s = time.perf_counter()
    finally:
        failures += await _to_the_end(_failures("resume", [receiver.resume() for receiver in receivers]))
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
    version: WeightVersion, receivers: Sequence[WeightReceiver], failures: Sequence[_Failure]
) -> WeightUpdateError:
    kind = EnginesGone if all(failure.is_gone for failure in failures) else WeightUpdateError
    causes = "; ".join(failure.text for failure in failures)
    return kind(f"the push of version {version} to {len(receivers)} engine(s): {causes}")


async def _failures(what: str, calls: Sequence[Coroutine[Any, Any, None]]) -> list[_Failure]:
    """Await all calls, one a receiver, and tell which failed; an error that is no engine's is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    return [
        _Failure(text=f"engine {index}: {what} failed: {result}", is_gone=isinstance(result, EnginesGone))
        for index, result in enumerate(results)
        if result is not None
    ]


async def _to_the_end(work: Coroutine[Any, Any, list[_Failure]]) -> list[_Failure]:
    """Await `work`; a cancellation waits for it before it goes on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
    finally:
        task.cancel()  # harmless when done; otherwise a second cancellation came, and nobody waits any more


MAX_ATTEMPTS = 3
"""How often a push is made whose engines are gone in the middle of it: it may be what kills them."""

OnPush = Literal["interrupt", "turn_boundary", "drain"]


async def push_under(
    policy: OnPush,
    receivers: Sequence[WeightReceiver],
    weights: Weights,
    version: WeightVersion,
    *,
    drained: Callable[[], AbstractAsyncContextManager[None]],
) -> PushReport:
    """As `push`, made again where the engines are gone in the middle of it: they may be started again.

    Inside `drained()` no rollout is under way, and none begins.
    """
    async with drained() if policy == "drain" else contextlib.nullcontext():
        mode = PauseMode.RETRACT if policy == "interrupt" else PauseMode.WAIT
        push_id = new_push_id()
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(EnginesGone):
                return await push(receivers, weights, version, mode, push_id=push_id)
        return await push(receivers, weights, version, mode, push_id=push_id)
