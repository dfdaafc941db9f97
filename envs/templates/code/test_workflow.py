"""1. The hidden cases decide, fenced or not, and whatever the program does; 2. no function is in both splits."""

import pytest

from areal_agent.testing import play

from .tasks import load, task_of
from .workflow import solve

TASK = task_of(37, 512)
RIGHT = TASK["program"]


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (RIGHT, 1.0),
        (f"So:\n```python\n{RIGHT}\n```", 1.0),
        (RIGHT.replace("+", "-"), 0.0),
        ("I cannot do that.", 0.0),
        ("import os; os._exit(0)", 0.0),
    ],
)
def test_hidden_cases_decide(said: str, reward: float) -> None:
    trajectory = play(solve, TASK, said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)


def test_no_function_is_in_both_splits() -> None:
    train, test = ({task["question"] for task in load(split, 0)} for split in ("train", "test"))
    assert not train & test
