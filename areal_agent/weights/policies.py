"""What new weights do to answers under way: the three policies of `engine.on_push`.

    interrupt       they stop at a token, and go on under the new weights
    turn_boundary   they end under the old ones; the turns after them wait, and begin under the new ones
    drain           whole rollouts end under the old ones; those after them begin under the new ones

It knows rollouts only as something that can be drained.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal

from areal_agent.engine_types import PauseMode, Weights
from areal_agent.errors import EnginesGone
from areal_agent.protocols import WeightReceiver
from areal_agent.types import WeightVersion
from areal_agent.weights.push import PushReport, new_push_id, push

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
