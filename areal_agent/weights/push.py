"""Gives a new weight version to engines in the middle of their work, and measures what that costs.

    pause all ──▶ update all ──▶ resume all        resume comes always, whatever failed: the old version goes on
    |◀ pause_s ▶|◀ transfer_s ▶|◀ resume_s ▶|
    |◀──────────────── stall_s ────────────▶|

It knows receivers by their protocol alone, and nothing of how weights are stored.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agent.errors import EngineError, WeightUpdateError
from areal_agent.protocols import WeightReceiver
from areal_agent.types import DiskWeights, PauseMode, SharedMemoryWeights, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """What one push cost, in seconds; `stall_s` is the time from the first pause to the last resume."""

    version: WeightVersion
    pause_s: float
    transfer_s: float
    resume_s: float
    stall_s: float


async def push(
    receivers: Sequence[WeightReceiver],
    weights: SharedMemoryWeights | DiskWeights,
    version: WeightVersion,
    mode: PauseMode = PauseMode.RETRACT,
) -> PushReport:
    """Swap the weights of all receivers at once, each at a token boundary.

    Raises WeightUpdateError naming each receiver that failed, at which step and how; the others serve `version` if the
    update was reached. Every receiver has been told to resume by then, also when this call is cancelled.
    """
    started_s = paused_s = updated_s = time.perf_counter()
    failures: list[str] = []
    try:
        failures += await _failures("pause", [receiver.pause(mode) for receiver in receivers])
        paused_s = updated_s = time.perf_counter()
        if not failures:
            failures += await _failures("update", [receiver.update_weights(weights, version) for receiver in receivers])
            updated_s = time.perf_counter()
    finally:
        failures += await _to_the_end(_failures("resume", [receiver.resume() for receiver in receivers]))
    resumed_s = time.perf_counter()
    if failures:
        raise WeightUpdateError(f"the push of version {version} to {len(receivers)} engine(s): {'; '.join(failures)}")
    return PushReport(
        version=version,
        pause_s=paused_s - started_s,
        transfer_s=updated_s - paused_s,
        resume_s=resumed_s - updated_s,
        stall_s=resumed_s - started_s,
    )


async def _failures(what: str, calls: Sequence[Coroutine[Any, Any, None]]) -> list[str]:
    """Await all calls, one a receiver, and tell which failed; an error that is no engine's is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    return [f"engine {index}: {what} failed: {result}" for index, result in enumerate(results) if result is not None]


async def _to_the_end(work: Coroutine[Any, Any, list[str]]) -> list[str]:
    """Await `work`; a cancellation waits for it before it goes on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
    finally:
        task.cancel()  # harmless when done; otherwise a second cancellation came, and nobody waits any more
