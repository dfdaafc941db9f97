"""Games of the real package, played by a scripted model.

1. its scores are the rewards, also after illegal moves; 2. opponents: random, another model, the policy itself, of
which each further player is a role; 3. a game without an end has no reward; 4. bad arguments are named.
"""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from areal_agent import ConfigError, Status
from areal_agent.testing import play, play_roles
from envs.textarena.tasks import load
from envs.textarena.workflow import opened, solve

pytest.importorskip("textarena")


def task(game: str, **changes: Any) -> dict[str, Any]:
    return load("train", 0, game, size=2, **changes)[0]


def theirs(start: dict[str, Any], moves: Sequence[str]) -> dict[int, float]:
    """The scores when the game is played by hand."""
    game = opened(start)
    for move in moves:
        game.get_observation()
        is_over, _ = game.step(move)
    assert is_over
    return game.close()[0]


@pytest.mark.parametrize("said", [[f"I say [{n}]." for n in range(11, 20)], ["five", "six"], ["[7]"] * 10])
def test_the_games_score_is_the_reward(said: Sequence[str]) -> None:
    start = task("GuessTheNumber-v0") | {"seed": 12}
    number = int(opened(start).state.game_state["game_number"])
    said = said[: [f"[{number}]" in one for one in said].index(True) + 1] if f"I say [{number}]." in said else said
    trajectory = play(solve, start, *said)
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, None)
    assert trajectory.rewards.final == theirs(start, said)[0]
    assert len({turn.parent is None for turn in trajectory.turns[1:]} | {False}) == 1  # one conversation


def test_against_a_random_player_and_another_model() -> None:
    start = task("KuhnPoker-v0-short", num_players=2)
    trajectory = play(solve, start, *["nonsense"] * 2)
    assert (trajectory.error, trajectory.rewards.final) == (None, -1.0)
    assert trajectory.logged == {"score_0": -1, "score_1": 1}
    start = task("TicTacToe-v0", num_players=2, opponent="expert")
    trajectory = play(solve, start, "[0]", others={"expert": ["nonsense"] * 2})
    assert (trajectory.error, trajectory.rewards.final, "expert.1" in trajectory.logged) == (None, 1.0, True)


def test_the_policy_against_itself() -> None:
    start = task("TicTacToe-v0", num_players=2, opponent=None)
    moves = ["[0]", "[3]", "[1]", "[4]", "[2]"]
    ended, scores = play_roles(solve, start, *moves), theirs(start, moves)
    assert {role: (one.status, one.rewards.final) for role, one in ended.items()} == {
        "": (Status.COMPLETED, scores[0]),
        "player_1": (Status.COMPLETED, scores[1]),
    }
    assert [sum(turn.parent is None for turn in one.turns) for one in ended.values()] == [1, 1]


def test_a_game_without_an_end_has_no_reward() -> None:
    trajectory = play(solve, task("TicTacToe-v0", num_players=2, opponent=None, max_turns=1), "[0]")
    assert trajectory.status is Status.MISSING_REWARD


def test_bad_arguments_are_named_and_splits_differ() -> None:
    for values, message in (
        ({"game": "TicTacTo-v0"}, "did you mean TicTacToe-v0"),
        ({"game": "Nim-v0", "num_players": 0}, "num_players is 0; give a whole number"),
        ({"game": "Nim-v0", "split": "dev"}, "split is 'dev'; valid: 'train', 'test'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load(**{"split": "train", "seed": 0, **values})
    seeds = [{one["seed"] for one in load(split, seed, "Nim-v0")} for split in ("train", "test") for seed in (0, 1)]
    assert len(set().union(*seeds)) == sum(map(len, seeds))
