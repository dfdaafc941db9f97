"""Lets the processes of a server take weights from the trainer, while they sample. Knows neither servers nor pushes.

A process receives in a thread of its own (reception.py): a call that lasted as long would hold up the requests. So it
is asked again and again how that goes, seldomer each time.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Protocol

import orjson

from areal_agent.engine.wire.distributed_weights import encode_distributed
from areal_agent.engine_types import DistributedWeights
from areal_agent.errors import WeightUpdateError

FIRST_LOOK_S = 0.02
LAST_LOOK_S = 0.5


class Ask(Protocol):
    """What each process of a server answers to a method of ours. Raises EngineError where one has none of it."""

    async def __call__(self, method: str, arguments: Sequence[str]) -> Sequence[str]: ...


async def receive(ask: Ask, push_id: str, weights: DistributedWeights, *, beside: str | None) -> None:
    """Let all processes receive, prove and hold these. Raises EngineError when one does not.

    Of what they held before they keep what came in the push `beside`.
    """
    told = {**encode_distributed(weights), "group": secrets.token_hex(8)}
    await ask("receive_weights", [push_id, orjson.dumps(told).decode(), beside or ""])
    look_s = FIRST_LOOK_S
    while unproved := [state for state in await ask("received", [push_id]) if state != "proved"]:
        if failed := [state for state in unproved if state != "receiving"]:
            raise WeightUpdateError(f"the server did not take the weights: {failed[0]}")
        await asyncio.sleep(look_s)
        look_s = min(2 * look_s, LAST_LOOK_S)
