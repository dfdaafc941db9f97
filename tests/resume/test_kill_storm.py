"""A run whose process is killed again and again at random moments, and started again each time: the commit code itself,
without torch. The ledger is proved after each death; in the end each rollout that ended is trained exactly once in the
lineage that lives, which is what the last checkpoint was trained on. Five kills when slow, a hundred when full.
Kills at the named commit points are conformance case 14.
"""

import random
from pathlib import Path

import pytest

from tests.resume.lives import Zygote, check_end, check_life, zygote

__all__ = ["zygote"]

MAX_EVENTS_A_LIFE = 60


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=pytest.mark.full)])
def test_killed_at_random_moments(zygote: Zygote, tmp_path: Path, num_kills: int) -> None:
    moments = random.Random(num_kills)
    for _ in range(num_kills):
        zygote.live(tmp_path, num_steps=num_kills, kill_after=moments.randint(1, MAX_EVENTS_A_LIFE))
        check_life(tmp_path)
    assert zygote.live(tmp_path, num_steps=num_kills)[-1] == "dead 0"
    check_end(tmp_path)
