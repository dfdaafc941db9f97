"""The learning rate by the number of updates.

- It rises linearly over the warm-up to its peak; constant stays there, linear and cosine fall, and never reach zero.
- The warm-up is a share of the run's updates: the paper's 0.001 of 1,000 is one, which is none.
- A run that goes on beyond its planned updates keeps the last rate.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.optimizer import Schedule


def rates(shape: str, num_warmup: int, num_updates: int) -> list[float]:
    schedule = Schedule(shape=shape, peak=2.0, num_warmup=num_warmup, num_updates=num_updates)
    return [schedule.at(number) for number in range(num_updates)]


def test_constant_after_the_warm_up():
    assert rates("constant", 4, 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_without_a_warm_up():
    assert rates("linear", 0, 4) == [2.0, 1.5, 1.0, 0.5]


def test_cosine_is_half_of_the_peak_half_way():
    falling = rates("cosine", 2, 10)
    assert falling[:3] == [1.0, 2.0, 2.0]
    assert falling[6] == pytest.approx(1.0)
    assert falling[4] == pytest.approx(1.0 + math.cos(math.pi / 4))


def test_the_warm_up_is_a_share_of_all_updates():
    config = TrainerConfig(learning_rate=1.0)
    assert Schedule.of(config, num_updates=4000).at(0) == 0.25
    assert Schedule.of(config, num_updates=1000).at(0) == 1.0


@given(
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    num_updates=st.integers(1, 500),
    num_warmup=st.integers(0, 500),
    number=st.integers(0, 2000),
)
def test_a_rate_is_never_zero_and_never_beyond_the_peak(shape, num_updates, num_warmup, number):
    schedule = Schedule(shape=shape, peak=1.0, num_warmup=min(num_warmup, num_updates - 1), num_updates=num_updates)
    assert 0.0 < schedule.at(number) <= 1.0
    assert schedule.at(max(number, num_updates)) == schedule.at(num_updates - 1)
