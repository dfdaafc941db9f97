"""Tasks of reasoning-gym by name, drawn in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from areal_agent import ConfigError

GYM = Path(__file__).with_name("gym.py")
SIZES = {"train": 1_000, "test": 100}
IN_TAGS = "Think step by step. Then give only the result, between <answer> and </answer>."
SCORED = ("tags", "numbers", "message")
ALONE = "Give only the result."


def require_reasoning_gym() -> None:
    """Raise ConfigError where reasoning-gym is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            "the package 'reasoning-gym' is missing; install the extra, which needs a C compiler: "
            "pip install 'areal-agent[reasoning-gym]'"
        )


def load(
    split: str,
    seed: int,
    name: str,
    size: int | None = None,
    levels: Any = (),
    scored: str = "tags",
    instructions: str | None = None,
    system: str | None = None,
    attempts: int = 3,
    **params: Any,
) -> list[dict[str, Any]]:
    """Return `size` tasks of `name`. No question of the split `test` is in `train`, whatever the seeds and parameters.

    `levels` of the package's curriculum are drawn in equal parts and in that order; `params` are of the task's own
    config, and win over those of a level. `scored` of a message are the last `<answer>` tags (`tags`), its last number
    (`numbers`), or all of it (`message`). `instructions` follow each question, and `system` is a message before it;
    without it many templates write one of their own. `attempts` is for `solve_in_turns`. Raises ConfigError.
    """
    require_reasoning_gym()
    if split not in SIZES:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SIZES))}")
    if scored not in SCORED:
        raise ConfigError(f"scored is {scored!r}; valid: {', '.join(map(repr, SCORED))}")
    if not isinstance(levels, list | tuple) or not all(type(level) is int for level in cast(Any, levels)):
        raise ConfigError(f"levels is {levels!r}; give a list of whole numbers, [0, 1, 2] for example")
    size = SIZES[split] if size is None else size
    for key, value, least in (("size", size, len(levels) or 1), ("attempts", attempts, 1)):
        if type(value) is not int or value < least:
            raise ConfigError(f"{key} is {value!r}; give a whole number, at least {least}")
    request = {"split": split, "seed": seed, "name": name, "size": size, "levels": list(levels), "params": params}
    instructions = (IN_TAGS if scored == "tags" else ALONE) if instructions is None else instructions
    return [
        {
            "id": f"{name}-{split}-{seed}-{index}",
            "messages": [
                *([] if system is None else [{"role": "system", "content": system}]),
                {"role": "user", "content": f"{task.pop('question')}\n\n{instructions}".rstrip()},
            ],
            "scored": scored,
            "attempts": attempts,
            **task,
        }
        for index, task in enumerate(draw(request))
    ]


def draw(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what gym.py draws. Its hashes have a fixed seed, because some generators iterate over sets."""
    done = subprocess.run(
        [sys.executable, "-P", str(GYM)],
        input=json.dumps(request),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ConfigError(f"reasoning-gym failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    drawn = json.loads(done.stdout)
    if isinstance(drawn, dict):
        raise ConfigError(str(drawn["error"]))  # pyright: ignore[reportUnknownArgumentType]
    return drawn
