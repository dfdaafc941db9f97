"""How three players play, on which the tiny model is warm-started. Reinforcement learning finds out which of them wins.

`demonstrations` yields conversations without end, as lists of messages. Each player is predictable: a model that learnt
from random guesses would guess at random, and have no habits to choose from.
"""

import random
from collections.abc import Callable, Iterator, Mapping

from .tasks import HIGHEST, LOWEST
from .workflow import MAX_TURNS, RULES, answer

Message = dict[str, str]


def halves(guess: int, low: int, high: int) -> int:
    """Guess the middle of what is left: at most seven guesses."""
    return (low + high) // 2


def forgets(guess: int, low: int, high: int) -> int:
    """Heed the last answer, and forget those before it."""
    return (low + HIGHEST) // 2 if guess < low else (LOWEST + high) // 2


def creeps(guess: int, low: int, high: int) -> int:
    """Go on by one."""
    return guess + 1 if guess < low else guess - 1


PLAYERS: Mapping[Callable[[int, int, int], int], float] = {halves: 0.3, forgets: 0.35, creeps: 0.35}
"""How often each player plays."""


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Yield games without end."""
    rng = random.Random(f"number_game/{seed}")
    while True:
        (player,) = rng.choices(list(PLAYERS), list(PLAYERS.values()))
        yield game(player, rng.randint(LOWEST, HIGHEST))


def game(player: Callable[[int, int, int], int], secret: int) -> list[Message]:
    """Return one game. It begins in the middle, whoever plays."""
    messages = [{"role": "user", "content": RULES}]
    low, high = LOWEST, HIGHEST
    guess = (low + high) // 2
    for _ in range(MAX_TURNS):
        messages.append({"role": "assistant", "content": str(guess)})
        heard = answer(str(guess), secret)
        if heard == "right":
            break
        messages.append({"role": "user", "content": heard})
        low, high = (guess + 1, high) if heard == "higher" else (low, guess - 1)
        guess = player(guess, low, high)
    return messages
