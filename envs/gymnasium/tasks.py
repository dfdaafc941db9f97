"""Starts of a Gymnasium environment, by name."""

import importlib.util
from typing import Any

from areal_agent import ConfigError

INSTALL = "the package 'gymnasium' is missing; pip install 'areal-agent[gymnasium]'"
SIZES = {"train": 1_000, "test": 100}


def load(
    split: str,
    seed: int,
    env: str,
    prompt: str = "",
    options: dict[str, Any] | None = None,
    size: int | None = None,
    max_turns: int = 50,
    no_action: float = 0.0,
) -> list[dict[str, Any]]:
    """Return `size` starts of `env`, as `gymnasium.make` takes it (`module:Name-v0` too), with `options` for it.

    `prompt` stands before the first observation: the rules, and how to answer. `no_action` is the reward of an answer
    without an action, where rewards below 0 would make it the better one. Raises ConfigError for an environment
    that there is not, and for one whose actions are neither numbers (`Discrete`) nor texts (`Text`).
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise ConfigError(INSTALL)
    if split not in SIZES:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SIZES))}")
    size = SIZES[split] if size is None else size
    for key, value in (("size", size), ("max_turns", max_turns)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key} is {value!r}; give a whole number, at least 1")
    opened(env, options or {}).close()
    return [
        {
            "id": f"{env}-{split}-{seed}-{index}",
            "env": env,
            "options": options or {},
            "prompt": prompt,
            "seed": ((seed * 1_000_003 + index) * 2 + (split == "test")) % 2**31,
            "max_turns": max_turns,
            "no_action": no_action,
        }
        for index in range(size)
    ]


def opened(env: str, options: dict[str, Any]) -> Any:
    """Return an environment. Raises ConfigError."""
    from gymnasium import make  # pyright: ignore  # the extra
    from gymnasium.spaces import Discrete, Text  # pyright: ignore

    try:
        made: Any = make(env, **options)
    except Exception as error:  # the boundary: an environment may raise anything
        raise ConfigError(f"gymnasium cannot make {env!r} with {options}: {type(error).__name__}: {error}") from error
    if not isinstance(made.action_space, Discrete | Text):
        raise ConfigError(f"the actions of {env!r} are {made.action_space}; only Discrete and Text can be told in text")
    return made
