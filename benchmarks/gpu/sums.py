"""The questions of configs/smollm2.yaml without reasoning-gym, which a GPU's machine would have to compile in part."""

import random
from typing import Any

from envs.reasoning_gym.gym import is_held_out
from envs.reasoning_gym.tasks import ALONE, SIZES

SUMS = [(f"Calculate {one} + {other}.", str(one + other)) for one in range(11) for other in range(11)]


def load(split: str, seed: int) -> list[dict[str, Any]]:
    """Return tasks for benchmarks/real_model/workflow.py. No question of the split `test` is in `train`."""
    questions = [one for one in SUMS if is_held_out(one[0]) == (split == "test")]
    drawn = random.Random(f"{split} {seed}").choices(questions, k=SIZES[split])
    return [
        {
            "messages": [{"role": "system", "content": ""}, {"role": "user", "content": f"{text}\n\n{ALONE}"}],
            "answer": sum_,
        }
        for text, sum_ in drawn
    ]
