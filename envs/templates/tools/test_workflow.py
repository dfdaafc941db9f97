"""1. Looked up and told earns the reward, anything else does not; 2. a malformed call is answered; 3. no item is in
both splits."""

import pytest

from areal_agent.testing import play, tool_call

from .tasks import load, stock_of
from .workflow import solve

TASK = {"question": "How many of item 1234 are there?", "item": "1234"}
LOOK_UP = tool_call("stock", item="1234")
RIGHT = f"There are {stock_of('1234')}."


@pytest.mark.parametrize(
    ("said", "reward"),
    [((LOOK_UP, RIGHT), 1.0), ((LOOK_UP, "There are some."), 0.0), (("None.",), 0.0), ((LOOK_UP,) * 3, 0.0)],
)
def test_what_is_told_earns_the_reward(said: tuple[str, ...], reward: float) -> None:
    trajectory = play(solve, TASK, *said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)


def test_a_malformed_call_is_answered() -> None:
    trajectory = play(solve, TASK, tool_call("stock", thing="1234"), RIGHT)
    assert (trajectory.rewards.final, trajectory.error) == (1.0, None)
    assert "error" in str(trajectory.turns[1].request_delta).lower()


def test_no_item_is_in_both_splits() -> None:
    train, test = ({task["item"] for task in load(split, 0)} for split in ("train", "test"))
    assert not train & test
