"""The number game, beyond its own tests (envs/number_game/test_workflow.py).

1. What the other player says to a guess, also to hostile ones; 2. a won game earns 1.0 in the turn that wins it, eight
turns are all, and an empty answer costs a turn; 3. every player of the demonstrations keeps the rules, and they differ;
4. every number is a task once, in both splits.
"""

from itertools import islice

import pytest

from areal_agent.testing import play
from envs.number_game.demonstrations import PLAYERS, demonstrations, game
from envs.number_game.tasks import HIGHEST, LOWEST, load
from envs.number_game.workflow import MAX_TURNS, answer, solve


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("40", "right"),
        ("Not 32, but 40!", "right"),
        ("40, or else 41", "lower"),  # the last number counts
        ("0", "higher"),
        ("-40", "right"),
        (" ".join(map(str, range(LOWEST, HIGHEST + 1))), "lower"),  # all at once is a guess of 64
        ("9" * 100_000, "lower"),
        ("", "say a number"),
        ("forty", "say a number"),
        ("\x00\x07", "say a number"),
        ("٤٠", "right"),  # Arabic digits
    ],
)
def test_what_a_guess_hears(said: str, heard: str) -> None:
    assert answer(said, 40) == heard


@pytest.mark.parametrize(
    ("said", "reward", "num_turns"),
    [(("", "32", "40"), 1.0, 3), (("right",) * MAX_TURNS, 0.0, MAX_TURNS), (("64",) * 7 + ("40",), 1.0, MAX_TURNS)],
)
def test_a_game(said: tuple[str, ...], reward: float, num_turns: int) -> None:
    trajectory = play(solve, {"secret": 40}, *said)
    assert (trajectory.rewards.final, len(trajectory.turns), trajectory.error) == (reward, num_turns, None)
    assert trajectory.logged == {"turns": num_turns}


def test_demonstrations_keep_the_rules_and_differ() -> None:
    wins = {player: 0 for player in PLAYERS}
    for player in PLAYERS:
        for secret in range(LOWEST, HIGHEST + 1):
            guesses = [int(one["content"]) for one in game(player, secret) if one["role"] == "assistant"]
            assert len(guesses) <= MAX_TURNS and all(LOWEST <= guess <= HIGHEST for guess in guesses)
            wins[player] += guesses[-1] == secret
    assert sorted(wins.values())[-1] == HIGHEST and len(set(wins.values())) == len(PLAYERS)
    assert list(islice(demonstrations(3), 20)) == list(islice(demonstrations(3), 20))


def test_every_number_is_a_task() -> None:
    assert [task["secret"] for task in load("test", 0)] == list(range(LOWEST, HIGHEST + 1)) and load("train", 1)
