"""The optimiser.

- The learning rate is that of the schedule: an update later, the next one.
- Matrices are decayed, vectors are not. A gradient beyond the clip is scaled; the norm before is returned.
- A gradient that is not finite changes nothing and is no update.
"""

import math

import pytest
import torch

from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.optimizer import Optimizer, Schedule


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
