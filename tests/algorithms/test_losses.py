"""The decoupled PPO loss, against numbers worked out by hand.

- Unclipped tokens, tokens clipped above and below, and the capped behaviour weight.
- The gradient flows through the current log-probabilities alone, and not through clipped tokens.
- Parts add up to the whole, of loss, gradient and statistics; nothing at all still back-propagates.
- Absurd ratios stay finite. k3 is zero for equal policies and never negative.
"""

import math

import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.losses import LossStats, decoupled_ppo, k3

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.3, behavior_weight_cap=2.0)


def case() -> dict[str, torch.Tensor]:
    """Ratios u = 1.1, 1.5, 0.5, 0.5, 1.5; uncapped weights 1, 0.5, 1, 4, 2; advantages 2, 1, -1, 3, -2."""
    proximal = torch.full((5,), -2.0, dtype=torch.float64)
    return {
        "logprobs": proximal + torch.tensor([1.1, 1.5, 0.5, 0.5, 1.5], dtype=torch.float64).log(),
        "proximal": proximal,
        "behavior": proximal - torch.tensor([1.0, 0.5, 1.0, 4.0, 2.0], dtype=torch.float64).log(),
        "advantages": torch.tensor([2.0, 1.0, -1.0, 3.0, -2.0], dtype=torch.float64),
    }


# w * min(u A, clip(u) A): 1 * 2.2; 0.5 * 1.3 (clipped above); 1 * -0.8 (clipped below); 2 * 1.5 (weight capped);
# 2 * -3.0 (a bad token that grew is not clipped)
BY_HAND = [2.2, 0.65, -0.8, 3.0, -6.0]


def test_the_loss_is_the_negated_sum_over_the_steps_number_of_tokens():
    loss, _ = decoupled_ppo(**case(), config=CONFIG, num_loss_tokens=10)
    assert loss.item() == pytest.approx(-sum(BY_HAND) / 10)


def test_the_gradient_of_unclipped_tokens_is_weight_ratio_advantage_and_of_clipped_ones_zero():
    given = case()
    given["logprobs"].requires_grad_()
    loss, _ = decoupled_ppo(**given, config=CONFIG, num_loss_tokens=1)
    loss.backward()
    assert given["logprobs"].grad.tolist() == pytest.approx([-2.2, 0.0, 0.0, -3.0, 6.0])


def test_no_gradient_flows_through_proximal_and_behaviour_probabilities():
    given = {name: value.requires_grad_() for name, value in case().items() if name != "advantages"}
    loss, _ = decoupled_ppo(**given, advantages=case()["advantages"], config=CONFIG, num_loss_tokens=1)
    loss.backward()
    assert given["proximal"].grad is None
    assert given["behavior"].grad is None


def test_parts_add_up_to_the_whole():
    whole, stats = decoupled_ppo(**case(), config=CONFIG, num_loss_tokens=5)
    parts = [
        decoupled_ppo(**{name: value[part] for name, value in case().items()}, config=CONFIG, num_loss_tokens=5)
        for part in (slice(0, 2), slice(2, 5))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    merged = parts[0][1].merge(parts[1][1])
    assert merged.metrics() == pytest.approx(stats.metrics())


def test_statistics_by_hand():
    _, stats = decoupled_ppo(**case(), config=CONFIG, num_loss_tokens=5)
    weights = [1.0, 0.5, 1.0, 2.0, 2.0]
    assert stats.metrics() == pytest.approx(
        {
            "ratio_mean": 5.1 / 5,
            "ratio_max": 1.5,
            "clip_fraction_low": 1 / 5,
            "clip_fraction_high": 1 / 5,
            "approx_kl": sum(u - 1 - math.log(u) for u in (1.1, 1.5, 0.5, 0.5, 1.5)) / 5,
            "behavior_weight_mean": sum(weights) / 5,
            "behavior_weight_max": 4.0,
            "behavior_weight_capped_fraction": 1 / 5,
            "effective_sample_size": sum(weights) ** 2 / sum(w * w for w in weights) / 5,
        }
    )


def test_on_policy_it_is_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = decoupled_ppo(
        logprobs, logprobs.detach(), logprobs.detach(), torch.tensor([3.0, -1.0]), CONFIG, num_loss_tokens=2
    )
    loss.backward()
    assert logprobs.grad.tolist() == [-1.5, 0.5]


def test_no_tokens_make_a_loss_of_zero_that_back_propagates():
    nothing = torch.zeros(0, requires_grad=True)
    loss, stats = decoupled_ppo(nothing, torch.zeros(0), torch.zeros(0), torch.zeros(0), CONFIG, num_loss_tokens=0)
    loss.backward()
    assert loss.item() == 0.0
    assert stats == LossStats()


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize(("now", "before"), [(-1.0, -500.0), (-500.0, -1.0)])
def test_absurd_ratios_stay_finite(now, before, advantage):
    logprobs = torch.tensor([now], requires_grad=True)
    loss, _ = decoupled_ppo(
        logprobs, torch.tensor([before]), torch.tensor([now]), torch.tensor([advantage]), CONFIG, num_loss_tokens=1
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def test_k3_is_zero_for_equal_policies_and_positive_otherwise():
    assert k3(torch.tensor(0.0)).item() == 0.0
    assert k3(torch.tensor([-3.0, -0.01, 0.01, 3.0])).min().item() > 0.0
