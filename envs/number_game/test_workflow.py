"""The game: 1. halving wins, and the ledger is proved; 2. who runs out of turns, or names no number, does not;
3. demonstrations are games.
"""

from itertools import islice
from pathlib import Path

import pytest

from areal_agent.ledger.verify import verify
from areal_agent.testing import play

from .demonstrations import demonstrations, game, halves
from .workflow import MAX_TURNS, RULES, solve


@pytest.mark.parametrize("secret", [1, 40, 64])
def test_halving_wins(secret: int, tmp_path: Path) -> None:
    guesses = [message["content"] for message in game(halves, secret) if message["role"] == "assistant"]
    trajectory = play(solve, {"secret": secret}, *guesses, ledger=(ledger := tmp_path / "ledger.sqlite"))
    assert (trajectory.rewards.final, trajectory.error, len(trajectory.turns)) == (1.0, None, len(guesses))
    assert verify(ledger).is_ok


@pytest.mark.parametrize("guess", ["41", "I do not know."])
def test_eight_wrong_turns_lose(guess: str) -> None:
    trajectory = play(solve, {"secret": 40}, *[guess] * MAX_TURNS)
    assert (trajectory.rewards.final, trajectory.error) == (0.0, None)


def test_demonstrations_are_games() -> None:
    for one in islice(demonstrations(0), 50):
        assert one[0] == {"role": "user", "content": RULES}
        assert {message["role"] for message in one[1::2]} == {"assistant"}
