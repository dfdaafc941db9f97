"""What a workflow gets:

- rewards of every kind of number, and no other, of a completion or with a name; a refusal names the remedy
- a shared resource is opened once for each sandbox, also by concurrent callers, and closed with the run
- what was entered is left in reverse order
"""

import asyncio
import math
import re
from contextlib import asynccontextmanager
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from areal_agent.rollout.context import Rollout, SharedResources, as_reward


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        *((1, 1.0), (True, 1.0), (0.5, 0.5), (Decimal("0.5"), 0.5), (Fraction(1, 2), 0.5)),
        *((np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.True_, 1.0), (np.array([2]), 2.0)),
    ],
)
def test_every_number_is_a_reward(value: object, reward: float) -> None:
    assert as_reward(value) == reward


@pytest.mark.parametrize(
    ("value", "error", "remedy"),
    [
        *((value, ValueError, "raise Reject") for value in (math.nan, np.float32("nan"), Decimal("snan"))),
        *((value, ValueError, "clip it or scale it down") for value in (np.inf, 1e31, -(10**400), Decimal("1e31"))),
        *((value, TypeError, "rollout.reward(value, name=...)") for value in ((1.0, {"part": 0.5}), {"a": 1}, [1.0])),
        *((value, TypeError, "give an int") for value in ("1", None, 1j, np.array([1, 2]))),
    ],
)
def test_nothing_else_is(value: object, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=f"^a reward is a number.* got .*{re.escape(remedy)}"):
        as_reward(value)


async def test_a_reward_that_was_not_awaited() -> None:
    judging = asyncio.sleep(0, 1.0)
    with pytest.raises(TypeError, match="await it"):
        as_reward(judging)
    assert as_reward(await judging) == 1.0


def rollout(shared: SharedResources | None = None, **sandbox: object) -> Rollout:
    return Rollout(
        client=SimpleNamespace(), http_client=None, sync_client=None, sync_http_client=None, base_url="http://h/v1",
        api_key="", model="m", seed=0, is_eval=False, sandbox=sandbox, shared=shared or SharedResources(),
        open_role=None,
    )  # fmt: skip


def test_anthropics_clients_add_the_version() -> None:
    assert rollout().anthropic_base_url == "http://h"


def test_a_completion_has_no_parts() -> None:
    with pytest.raises(ValueError, match="not both"):
        rollout().reward(1, completion="c", name="style")


async def test_a_shared_resource_is_opened_once() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def open_it(_rollout: Rollout):
        events.append("open")
        await asyncio.sleep(0)
        yield "pool"
        events.append("close")

    async with SharedResources() as shared:
        assert await asyncio.gather(*(rollout(shared).shared(open_it) for _ in range(3))) == ["pool"] * 3
        assert events == ["open"]
        await rollout(shared, wall_s=10).shared(open_it)
    assert events == ["open", "open", "close", "close"]


async def test_a_resource_that_fails_to_open_is_tried_again() -> None:
    attempts = []

    @asynccontextmanager
    async def open_it(_rollout: Rollout):
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no")
        yield "pool"

    async with SharedResources() as shared:
        with pytest.raises(OSError, match="no"):
            await rollout(shared).shared(open_it)
        assert await rollout(shared).shared(open_it) == "pool"


async def test_what_was_entered_is_left_in_reverse() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def enter(name: str):
        yield name
        events.append(name)

    one = rollout()
    await one.enter(enter("a"))
    await one.enter(enter("b"))
    await one.aclose()
    assert events == ["b", "a"]
