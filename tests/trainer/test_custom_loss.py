"""examples/custom_loss: 1. its config loads and names functions that exist; 2. a step with them trains; 3. near ratio 1
its objective is PPO's, and far from it the gradient fades."""

from pathlib import Path

import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.losses import LossTokens
from areal_agent.config import Config
from areal_agent.trainer.config import TrainerConfig
from examples.custom_loss.loss import smooth_clip
from tests.trainer.lab import Lab

CONFIG = Path(__file__).parents[2] / "examples" / "custom_loss" / "custom_loss.yaml"


def test_the_example_trains(model_folder, make_batch, as_input):
    algorithm = Config.load(CONFIG).algorithm
    given = as_input(make_batch(1, num_groups=2))
    lab = Lab(model_folder, TrainerConfig(learning_rate=3e-3), algorithm)
    good = next(one for one in given.records if given.rewards[one.session_id] == 1.0)
    before = lab.mean_logprob([good])
    metrics = [lab.stepper.train(given) for _ in range(4)]
    assert metrics[0]["num_updates"] == 2
    assert (metrics[0]["advantage_min"], metrics[0]["advantage_max"]) == (-0.5, 0.5)
    assert lab.mean_logprob([good]) > before + 0.3


def test_the_soft_edge_by_hand():
    logprobs = torch.tensor([0.0, 5.0], requires_grad=True)
    tokens = LossTokens(
        logprobs=logprobs,
        entropy=torch.zeros(2),
        proximal=torch.zeros(2),
        behavior=torch.zeros(2),
        advantages=torch.tensor([2.0, 1.0]),
        weights=torch.ones(2),
        sequences=torch.zeros(2, dtype=torch.long),
    )
    values = smooth_clip(tokens, AlgorithmConfig(clip_high=0.25))
    assert values.tolist() == pytest.approx([2.0, 1.25])
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([2.0, 0.0], abs=1e-6)
