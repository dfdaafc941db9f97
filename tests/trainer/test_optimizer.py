"""The learning rate and the optimiser.

- The rate rises linearly to its peak; constant stays there, linear and cosine fall, and never reach zero.
- The warm-up is a share of the run's updates: the paper's 0.001 of 1,000 is one update, which is no warm-up.
- A run that goes on beyond its planned updates keeps the last rate. Each update uses the schedule's next rate.
- Matrices are decayed, vectors are not. A gradient beyond the clip is scaled; the norm before is returned.
- A gradient that is not finite changes nothing and is no update.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.optimizer import Optimizer, Schedule


def rates(shape: str, num_warmup: int, num_updates: int) -> list[float]:
    schedule = Schedule(shape=shape, peak=2.0, num_warmup=num_warmup, num_updates=num_updates)
    return [schedule.at(number) for number in range(num_updates)]


@pytest.mark.parametrize(
    ("shape", "num_warmup", "expected"),
    [("constant", 4, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]), ("linear", 0, [2.0, 1.5, 1.0, 0.5])],
)
def test_rates_by_hand(shape, num_warmup, expected):
    assert rates(shape, num_warmup, len(expected)) == expected


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


def parameter(*shape: int, gradient: float) -> torch.nn.Parameter:
    one = torch.nn.Parameter(torch.ones(shape))
    one.grad = torch.full(shape, gradient)
    return one


def test_the_learning_rate_follows_the_schedule():
    one = parameter(1, 1, gradient=0.0)
    config = TrainerConfig(learning_rate=1.0, warmup_fraction=0.4)
    optimizer = Optimizer([one], config, Schedule.of(config, num_updates=10))
    rates = []
    for _ in range(6):
        one.grad = torch.zeros(1, 1)
        rates.append(optimizer.learning_rate)
        optimizer.update()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_matrices_are_decayed_and_vectors_are_not():
    matrix, vector = parameter(2, 2, gradient=0.0), parameter(2, gradient=0.0)
    Optimizer([matrix, vector], TrainerConfig(learning_rate=0.1, weight_decay=0.5)).update()
    assert matrix.flatten().tolist() == pytest.approx([0.95] * 4)
    assert vector.tolist() == [1.0, 1.0]


def test_a_large_gradient_is_clipped():
    # with betas 0 and a large epsilon, AdamW moves by learning_rate / epsilon * gradient: here by the clipped gradient
    config = TrainerConfig(learning_rate=1e6, epsilon=1e6, betas=(0.0, 0.0), weight_decay=0.0, gradient_clip=1.0)
    one = parameter(2, 2, gradient=5.0)
    norm = Optimizer([one], config).update()
    assert norm == pytest.approx(10.0)
    assert one.flatten().tolist() == pytest.approx([0.5] * 4, abs=1e-5)


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(gradient):
    one = parameter(2, 2, gradient=gradient)
    optimizer = Optimizer([one], TrainerConfig())
    optimizer.update()
    assert one.flatten().tolist() == [1.0] * 4
    assert optimizer.num_updates == 0
