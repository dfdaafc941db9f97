"""Environments of the real package, played by a scripted model.

1. the sum of the rewards is the reward, of numbers and of texts; 2. an answer without an action is told so;
3. environments that there are not, or whose actions are neither, are refused.
"""

import re
from typing import Any

import pytest

from areal_agent import ConfigError, Status
from areal_agent.testing import play
from envs.gymnasium.tasks import load
from envs.gymnasium.workflow import solve

gymnasium: Any = pytest.importorskip("gymnasium")

LAKE = {"env": "FrozenLake-v1", "options": {"render_mode": "ansi", "is_slippery": False}}


class Echo(gymnasium.Env):
    """Pays half a point for each "yes"; an episode has two steps."""

    action_space = gymnasium.spaces.Text(8)
    observation_space = gymnasium.spaces.Text(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 2
        return "ready", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return "go", 0.5 * (action == "yes"), self.left == 0, False, {}


gymnasium.register("Echo-v0", Echo)


def texts(trajectory: Any) -> list[str]:
    return [one["content"] for turn in trajectory.turns for one in turn.request_delta]


@pytest.mark.parametrize(
    ("args", "said", "reward"),
    [
        (LAKE, ["1", "It is 1.", "2", "1", "2", "2"], 1.0),
        (LAKE, ["1", "2"], 0.0),
        (LAKE | {"max_turns": 2}, ["0", "0"], 0.0),
        (LAKE | {"max_turns": 2, "no_action": -0.5}, ["left", "0"], -0.5),
        ({"env": "Echo-v0"}, ["yes", "no"], 0.5),
    ],
)
def test_the_sum_of_the_rewards_is_the_reward(args: dict[str, Any], said: list[str], reward: float) -> None:
    trajectory = play(solve, load("train", 0, prompt="Play.", **args)[0], *said)
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, None)
    assert (trajectory.rewards.final, trajectory.logged["turns"]) == (reward, len(said))
    assert texts(trajectory)[0].startswith("Play.\n\n")


def test_an_answer_without_an_action_is_told_so() -> None:
    trajectory = play(solve, load("test", 0, **LAKE)[0], "left", "9", "1", "2")
    assert [text.startswith("That names no action") for text in texts(trajectory)] == [False, True, True, False]


def test_what_there_is_not_is_refused() -> None:
    for env, message in (("Frozen-v1", "gymnasium cannot make 'Frozen-v1'"), ("Pendulum-v1", "only Discrete and Text")):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load("train", 0, env)
