"""Starts of the environment that an OpenEnv server has."""

import importlib.util
from typing import Any

from areal_agent import ConfigError

HOW = "pip install --no-deps 'openenv>=0.10,<0.11'; pip install 'fastmcp>=3,<4' fastapi uvicorn websockets httpx"
SIZES = {"train": 1_000, "test": 100}


def require_openenv() -> None:
    """Raise ConfigError where openenv is not installed."""
    if importlib.util.find_spec("openenv") is None:
        raise ConfigError(f"the package 'openenv' is missing; {HOW}")


def load(
    split: str,
    seed: int,
    url: str,
    field: str | None = None,
    prompt: str = "",
    reset: dict[str, Any] | None = None,
    size: int | None = None,
    max_turns: int = 20,
    step_s: float = 60.0,
) -> list[dict[str, Any]]:
    """Return `size` starts of the environment at `url`; no seed of the split `test` is in `train`.

    An answer is the action's `field`; without one, actions are calls of the server's tools. `reset` has what its
    reset takes beside the seed. `prompt` stands before the first observation. A step takes at most `step_s`.
    """
    require_openenv()
    if split not in SIZES:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SIZES))}")
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ConfigError(f"url is {url!r}; give the server's, as http://localhost:8000")
    size = SIZES[split] if size is None else size
    for key, value in (("size", size), ("max_turns", max_turns)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key} is {value!r}; give a whole number, at least 1")
    common = {"url": url, "field": field, "prompt": prompt, "max_turns": max_turns, "step_s": step_s}
    seeds = [((seed * 1_000_003 + index) * 2 + (split == "test")) % 2**31 for index in range(size)]
    return [
        {"id": f"openenv-{split}-{seed}-{index}", "reset": {**(reset or {}), "seed": one}, **common}
        for index, one in enumerate(seeds)
    ]
