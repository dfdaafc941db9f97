"""Starts of a game of textarena, by name."""

import difflib
import importlib.util
from typing import Any

from areal_agent import ConfigError

INSTALL = "the package 'textarena' is missing; pip install 'areal-agent[textarena]'"
SIZES = {"train": 1_000, "test": 100}
RANDOM = "random"


def load(
    split: str,
    seed: int,
    game: str,
    num_players: int = 1,
    opponent: str | None = RANDOM,
    size: int | None = None,
    max_turns: int = 50,
) -> list[dict[str, Any]]:
    """Return `size` starts of `game`, such as `TicTacToe-v0`; no seed of the split `test` is in `train`.

    `opponent` plays the other players: `random`, which takes one of the moves that the game last listed, a name of
    `rollout.models`, or null: the policy plays all of them. The policy's seat changes from task to task. A game ends
    without a score after `max_turns` moves. Raises ConfigError.
    """
    if importlib.util.find_spec("textarena") is None:
        raise ConfigError(INSTALL)
    from textarena.envs.registration import ENV_REGISTRY  # pyright: ignore  # the extra

    games = [name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")]
    if game not in games:
        near = difflib.get_close_matches(game, games)
        raise ConfigError(f"textarena has no game {game!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    if split not in SIZES:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SIZES))}")
    size = SIZES[split] if size is None else size
    for key, value in (("num_players", num_players), ("size", size), ("max_turns", max_turns)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key} is {value!r}; give a whole number, at least 1")
    return [
        {
            "id": f"{game}-{split}-{seed}-{index}",
            "game": game,
            "seed": (seed * 1_000_003 + index) * 2 + (split == "test"),
            "num_players": num_players,
            "seat": index % num_players,
            "opponent": opponent,
            "max_turns": max_turns,
        }
        for index in range(size)
    ]
