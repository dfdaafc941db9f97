"""The learning rate and the optimiser.

- The rate rises linearly to its peak; constant stays there, linear and cosine fall to a floor, and never reach zero.
- The warm-up is a share of the run's updates: the paper's 0.001 of 1,000 is one update, which is no warm-up.
- A run that goes on beyond its planned updates keeps the last rate. Each update uses the schedule's next rate.
- Matrices are decayed, vectors are not. A gradient beyond the clip is scaled; the norm before is returned.
- With a quantile, gradients are clipped at that of the last 64 norms, from the eighth on, and never above the clip.
- A gradient that is not finite changes nothing and is no update. One of zero changes nothing, but the schedule goes on;
  the norms of neither are remembered.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.optimizer import Optimizer, Schedule
from tests.trainer.lab import GRADIENT_DESCENT


def rates(shape: str, num_warmup: int, num_updates: int) -> list[float]:
    schedule = Schedule(shape=shape, peak=2.0, num_warmup=num_warmup, num_updates=num_updates)
    return [schedule.at(number) for number in range(num_updates)]


@pytest.mark.parametrize(
    ("shape", "num_warmup", "expected"),
    [("constant", 4, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]), ("linear", 0, [2.0, 1.5, 1.0, 0.5])],
)
def test_rates_by_hand(shape, num_warmup, expected):
    assert rates(shape, num_warmup, len(expected)) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("linear", [2.0, 1.75, 1.5, 1.25]), ("cosine", [2.0, 1.5 + math.sqrt(0.125), 1.5, 1.5 - math.sqrt(0.125)])],
)
def test_rates_with_a_floor_of_half_the_peak_by_hand(shape, expected):
    config = TrainerConfig(learning_rate=2.0, schedule=shape, learning_rate_floor=0.5, warmup_fraction=0.0)
    schedule = Schedule.of(config, num_updates=4)
    assert [schedule.at(number) for number in range(4)] == pytest.approx(expected)


def test_a_floor_without_a_decay_is_refused():
    with pytest.raises(ValueError, match="learning_rate_floor only applies to"):
        TrainerConfig(learning_rate_floor=0.1)


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
    matrix, vector = parameter(2, 2, gradient=1e-12), parameter(2, gradient=1e-12)
    Optimizer([matrix, vector], TrainerConfig(learning_rate=0.1, weight_decay=0.5)).update()
    assert matrix.flatten().tolist() == pytest.approx([0.95] * 4)
    assert vector.tolist() == pytest.approx([1.0, 1.0])


def test_a_large_gradient_is_clipped():
    one = parameter(2, 2, gradient=5.0)
    norm = Optimizer([one], GRADIENT_DESCENT.model_copy(update={"gradient_clip": 1.0})).update()
    assert norm == pytest.approx(10.0)
    assert one.flatten().tolist() == pytest.approx([0.5] * 4, abs=1e-5)


def moved_by(optimizer: Optimizer, one: torch.nn.Parameter, gradient: float) -> float:
    """Return by how much an update with this gradient lowers a parameter of one element."""
    before = one.item()
    one.grad = torch.full_like(one, gradient)
    optimizer.update()
    return before - one.item()


def optimizer_with(one: torch.nn.Parameter, *norms: float, clip: float = 1e9) -> Optimizer:
    """Return gradient descent that is clipped at the lower quartile, with updates of these gradient norms made."""
    config = GRADIENT_DESCENT.model_copy(update={"gradient_clip": clip, "gradient_clip_quantile": 0.25})
    optimizer = Optimizer([one], config)
    for norm in norms:
        moved_by(optimizer, one, norm)
    return optimizer


def test_a_gradient_is_clipped_at_a_quantile_of_those_before_it():
    one = parameter(1, gradient=0.0)
    optimizer = optimizer_with(one, 8, 1, 7, 2, 6, 3, 5)
    assert moved_by(optimizer, one, -4.0) == pytest.approx(-4.0, rel=1e-4)  # seven norms are too few
    assert moved_by(optimizer, one, 100.0) == pytest.approx(2.75, rel=1e-4)  # three quarters from 2 to 3
    assert moved_by(optimizer, one, 0.5) == pytest.approx(0.5, rel=1e-4)


def test_the_fixed_clip_still_bounds():
    one = parameter(1, gradient=0.0)
    assert moved_by(optimizer_with(one, *[4.0] * 8, clip=1.5), one, 9.0) == pytest.approx(1.5, rel=1e-4)


def test_only_the_last_64_norms_count():
    one = parameter(1, gradient=0.0)
    assert optimizer_with(one, *[1.0] * 100, *[3.0] * 47).clip == pytest.approx(1.0)
    assert optimizer_with(one, *[1.0] * 100, *[3.0] * 49).clip == pytest.approx(3.0)


@pytest.mark.parametrize(("gradient", "num_updates"), [(0.0, 9), (math.nan, 8), (math.inf, 8)])
def test_norms_that_taught_nothing_are_not_remembered(gradient, num_updates):
    one = parameter(1, gradient=0.0)
    optimizer = optimizer_with(one, *[1.0] * 8, gradient)
    assert list(optimizer.norms) == [1.0] * 8
    assert optimizer.num_updates == num_updates


def test_a_gradient_of_zero_changes_nothing():
    one = parameter(2, 2, gradient=1.0)
    optimizer = Optimizer([one], TrainerConfig(learning_rate=0.1, weight_decay=0.5))
    optimizer.update()
    before = one.detach().clone()
    one.grad = torch.zeros(2, 2)
    assert optimizer.update() == 0.0  # neither momentum nor decay moves the weights
    assert torch.equal(one, before)
    assert optimizer.adamw.state[one]["step"] == 1
    assert optimizer.num_updates == 2
