"""What a workflow gets:

- rewards of every kind of number, and no other, of a completion or with a name
- a shared resource is opened once, also by concurrent callers, and closed with the run
- what was entered is left in reverse order
"""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from areal_agent.rollout.context import Rollout, SharedResources, as_reward


@pytest.mark.parametrize(
    ("value", "reward"),
    [(1, 1.0), (True, 1.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.True_, 1.0)],
)
def test_every_number_is_a_reward(value: object, reward: float) -> None:
    assert as_reward(value) == reward


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (float("nan"), ValueError),
        (np.inf, ValueError),
        (1e31, ValueError),
        (-(10**400), ValueError),
        ("1", TypeError),
        (None, TypeError),
        ([1.0], TypeError),
        (1j, TypeError),
    ],
)
def test_nothing_else_is(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="a reward is"):
        as_reward(value)


def rollout(shared: SharedResources | None = None) -> Rollout:
    return Rollout(
        client=None, http_client=None, sync_client=None, sync_http_client=None, base_url="http://h/v1", api_key="", model="m",
        seed=0, is_eval=False, sandbox={}, shared=shared or SharedResources(),
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
    assert events == ["open", "close"]


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
