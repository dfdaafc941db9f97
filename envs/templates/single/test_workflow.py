"""1. The answer's last number earns the reward; 2. no number is in both splits; 3. some demonstrations are right."""

from itertools import islice

import pytest

from areal_agent.testing import play

from .demonstrations import demonstrations
from .tasks import load, score
from .workflow import solve

TASK = {"question": "Say 3712 backwards.", "answer": "2173"}


@pytest.mark.parametrize(("said", "reward"), [("It is 2173.", 1.0), ("It is 3712.", 0.0), ("I am not sure.", 0.0)])
def test_the_answer_earns_the_reward(said: str, reward: float) -> None:
    trajectory = play(solve, TASK, said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)


def test_no_number_is_in_both_splits() -> None:
    train, test = ({task["question"] for task in load(split, 0)} for split in ("train", "test"))
    assert not train & test


def test_some_demonstrations_are_right() -> None:
    said = [conversation[-1]["content"] for conversation in islice(demonstrations(0), 300)]
    answers = [task["answer"] for task in load("train", 0)[:300]]
    earned = [score(one, answer) for one, answer in zip(said, answers, strict=True)]
    assert 0.2 < sum(earned) / 300 < 0.45
