"""Policy losses, divergence estimates and the critic's loss, against numbers worked out by hand.

- ppo_clip: unclipped tokens, tokens clipped above and below, clip-higher, dual clip, the capped behaviour weight.
- Gradients flow through the current log-probabilities alone, not through clipped tokens; with cispo through all.
- gspo has one ratio a sequence; with one advantage a sequence it has value and gradient of the sequence form.
- The importance weight is of a token, of a sequence (product or geometric mean), or 1. Outside its bounds it is
  truncated or masked, as TIS, IcePop, MIS and AReaL's mask do.
- The divergence in the loss has the exact gradient of KL(policy || reference), also when another policy sampled; its
  weight is capped. Entropy enters with its coefficient.
- Parts add up to the whole; no tokens at all still back-propagate; absurd ratios stay finite.
- A user's own objective replaces ours; it is refused if it has a wrong shape, no gradient, is not finite, or cannot be
  imported.
- k1, k2 and k3 by hand; k2 and k3 are never negative; k1 and k3 are unbiased; one outlier counts MAX_KL.
- The approximate proximal policy lies where the token's age puts it.
- The critic's loss is clipped where that is worse, and nothing flows through what is clipped.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.losses import (
    MAX_KL,
    LossTokens,
    approximate_proximal,
    bounded,
    choose_objective,
    cispo,
    divergence,
    gspo,
    importance_weights,
    k1,
    k2,
    k3,
    policy_loss,
    ppo_clip,
    reverse_kl,
    value_loss,
)
from areal_agent.errors import ConfigError

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.3, behavior_weight_high=2.0)
PPO_CLIP = choose_objective(CONFIG)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_tokens(
    ratios: list[float],
    advantages: list[float],
    *,
    importance: list[float] | None = None,
    sequences: list[int] | None = None,
    weight: float = 0.2,
) -> LossTokens:
    """Tokens whose pi_theta / pi_prox and pi_prox / pi_behav are given."""
    count = len(ratios)
    proximal = torch.full((count,), -2.0, dtype=torch.float64)
    return LossTokens(
        logprobs=(proximal + tensor(*ratios).log()).requires_grad_(),
        entropy=torch.ones(count, dtype=torch.float64),
        proximal=proximal,
        behavior=proximal - tensor(*(importance or [1.0] * count)).log(),
        advantages=tensor(*advantages),
        weights=torch.full((count,), weight, dtype=torch.float64),
        sequences=torch.tensor(sequences or [0] * count),
    )


def case() -> LossTokens:
    return make_tokens([1.1, 1.5, 0.5, 0.5, 1.5], [2.0, 1.0, -1.0, 3.0, -2.0], importance=[1.0, 0.5, 1.0, 4.0, 2.0])


# w * min(u A, clip(u) A): 1 * 2.2; 0.5 * 1.3 (clipped above); 1 * -0.8 (clipped below); 2 * 1.5 (weight capped);
# 2 * -3.0 (a bad token that grew is not clipped)
BY_HAND = [2.2, 0.65, -0.8, 3.0, -6.0]


def gradient(tokens: LossTokens, config: AlgorithmConfig) -> list[float]:
    loss, _ = policy_loss(tokens, config, choose_objective(config))
    (of_logprobs,) = torch.autograd.grad(loss, tokens.logprobs)
    return of_logprobs.tolist()


def test_the_decoupled_loss_by_hand():
    loss, _ = policy_loss(case(), CONFIG, PPO_CLIP)
    assert loss.item() == pytest.approx(-sum(BY_HAND) * 0.2)


def test_the_gradient_of_unclipped_tokens_is_weight_ratio_advantage_and_of_clipped_ones_zero():
    assert gradient(replace(case(), weights=torch.ones(5)), CONFIG) == pytest.approx([-2.2, 0.0, 0.0, -3.0, 6.0])


def test_no_gradient_flows_through_proximal_and_behaviour_probabilities():
    tokens = case()
    others = [tokens.proximal.requires_grad_(), tokens.behavior.requires_grad_()]
    loss, _ = policy_loss(replace(tokens, proximal=others[0], behavior=others[1]), CONFIG, PPO_CLIP)
    assert torch.autograd.grad(loss, others, allow_unused=True) == (None, None)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_grew():
    tokens = make_tokens([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
    config = AlgorithmConfig(dual_clip=3.0)
    by_hand = [-3.0, 1.2, -2.0]
    assert ppo_clip(tokens, clip_low=0.2, clip_high=0.2, dual_clip=3.0).tolist() == pytest.approx(by_hand)
    assert gradient(tokens, config) == pytest.approx([0.0, 0.0, 0.4])
    _, stats = policy_loss(tokens, config, choose_objective(config))
    assert stats.metrics()["dual_clip_fraction"] == pytest.approx(1 / 3)


# two sequences: log-ratios log 2 and log 8 have the mean log 4; log 1 alone is log 1
GSPO_TOKENS = {"ratios": [2.0, 8.0, 1.0], "sequences": [0, 0, 1]}


def test_gspo_has_one_ratio_a_sequence():
    tokens = make_tokens(advantages=[1.0, 1.0, 3.0], **GSPO_TOKENS)
    assert gspo(tokens, clip_low=0.2, clip_high=9.0).tolist() == pytest.approx([4.0, 4.0, 3.0])
    assert gspo(tokens, clip_low=0.2, clip_high=1.0).tolist() == pytest.approx([2.0, 2.0, 3.0])


def test_cispo_clips_weights_and_keeps_every_gradient():
    tokens = replace(make_tokens([0.5, 1.0, 9.0], [1.0, -2.0, 3.0]), weights=torch.ones(3))
    config = AlgorithmConfig(preset="cispo", proximal="recompute", clip_low=0.2, clip_high=1.0)
    by_hand = (tokens.logprobs * tensor(0.8, -2.0, 6.0)).tolist()
    assert cispo(tokens, clip_low=0.2, clip_high=1.0).tolist() == pytest.approx(by_hand)
    assert gradient(tokens, config) == pytest.approx([-0.8, 2.0, -6.0])
    stats = policy_loss(tokens, config, choose_objective(config))[1].metrics()
    assert (stats["clip_fraction_low"], stats["clip_fraction_high"]) == pytest.approx((1 / 3, 1 / 3))


def test_the_importance_weight_of_a_sequence_is_the_product_or_the_geometric_mean_of_its_tokens():
    tokens = make_tokens([1.0, 1.0, 1.0], [1.0] * 3, importance=[0.5, 8.0, 3.0], sequences=[0, 0, 1])
    assert importance_weights(tokens, "token").tolist() == pytest.approx([0.5, 8.0, 3.0])
    assert importance_weights(tokens, "sequence").tolist() == pytest.approx([4.0, 4.0, 3.0])
    assert importance_weights(tokens, "geometric").tolist() == pytest.approx([2.0, 2.0, 3.0])
    assert importance_weights(tokens, "none").tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("bounds", "by_hand"),
    [
        ({"high": 2.0}, [0.1, 1.0, 2.0, 2.0]),  # TIS
        ({"low": 0.5, "high": 3.0}, [0.5, 1.0, 3.0, 3.0]),
        ({"low": 0.5, "high": 5.0, "mode": "mask"}, [0.0, 1.0, 4.0, 0.0]),  # IcePop
        ({"high": 5.0, "mode": "mask"}, [0.1, 1.0, 4.0, 0.0]),  # AReaL's mask
        ({"high": 4.0, "mode": "mask", "level": "sequence"}, [0.1, 0.1, 0.0, 0.0]),  # MIS: 0.1 * 1 and 4 * 6
        ({"low": 0.4, "mode": "mask", "level": "geometric"}, [0.0, 0.0, 24**0.5, 24**0.5]),  # MIS: 0.1**0.5 and 24**0.5
    ],
)
def test_importance_weights_outside_their_bounds_are_truncated_or_masked(bounds, by_hand):
    config = AlgorithmConfig.model_validate({f"behavior_weight_{name}": value for name, value in bounds.items()})
    tokens = make_tokens([1.0] * 4, [1.0] * 4, importance=[0.1, 1.0, 4.0, 6.0], sequences=[0, 0, 1, 1], weight=1.0)
    unbounded = importance_weights(tokens, config.behavior_weight_level)
    low, high = config.behavior_weight_low, config.behavior_weight_high
    masks = bounds.get("mode") == "mask"
    assert bounded(unbounded, low=low, high=high, masks=masks).tolist() == pytest.approx(by_hand)
    assert gradient(tokens, config) == pytest.approx([-one for one in by_hand])  # the other weights stay as they are


def test_the_divergence_from_a_reference_enters_the_loss():
    tokens = make_tokens([1.0, 1.0], [0.0, 0.0], importance=[1.0, 0.5])
    config = AlgorithmConfig(reference="initial", kl_coefficient=0.1)
    referred = replace(tokens, reference=tokens.logprobs.detach() + math.log(2))  # twice as likely under the reference
    loss, stats = policy_loss(referred, config, PPO_CLIP)
    assert loss.item() == pytest.approx(0.1 * 0.2 * 1.5 * (1 - math.log(2)))
    assert stats.metrics()["kl_policy_reference"] == pytest.approx(1 - math.log(2))
    (of_logprobs,) = torch.autograd.grad(loss, tokens.logprobs)
    assert of_logprobs.tolist() == pytest.approx([-0.1 * 0.2 * math.log(2), -0.1 * 0.2 * 0.5 * math.log(2)])


def test_in_expectation_the_loss_has_value_and_gradient_of_the_reverse_divergence():
    """Over all four tokens of a vocabulary, each as often as a stale policy samples it."""
    logits = tensor(0.3, -0.2, 1.0, 0.0).requires_grad_()
    sampler, reference = tensor(0.1, 0.4, 0.2, 0.3), tensor(0.25, 0.3, 0.05, 0.4)
    logprobs = logits.log_softmax(0)
    tokens = LossTokens(
        logprobs=logprobs,
        entropy=torch.zeros(4),
        proximal=sampler.log(),
        behavior=sampler.log(),
        advantages=torch.zeros(4),
        weights=torch.ones(4),
        sequences=torch.arange(4),
        reference=reference.log(),
    )
    exact = (logprobs.exp() * (logprobs - reference.log())).sum()
    estimate = (sampler * reverse_kl(tokens, tokens.behavior, cap=100.0)).sum()
    assert estimate.item() == pytest.approx(exact.item())
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (ours,) = torch.autograd.grad(estimate, logits)
    assert ours.tolist() == pytest.approx(expected.tolist())


def test_outliers_of_the_divergence_are_capped():
    tokens = replace(make_tokens([50.0, 1.0], [0.0, 0.0]), reference=tensor(-2.0, 28.0))  # 50 times as likely; e**30
    values = reverse_kl(tokens, tokens.behavior, cap=5.0)
    log_ratio = math.log(50.0)
    assert values.tolist() == pytest.approx([5.0 * (1 / 50 - 1 + log_ratio), MAX_KL])
    (of_logprobs,) = torch.autograd.grad(values.sum(), tokens.logprobs)
    assert of_logprobs.tolist() == pytest.approx([5.0 * log_ratio, -MAX_KL])


def test_the_entropy_bonus_lowers_the_loss():
    tokens = make_tokens([1.0, 1.0], [0.0, 0.0])
    entropy = tensor(2.0, 3.0).requires_grad_()
    loss, _ = policy_loss(replace(tokens, entropy=entropy), AlgorithmConfig(entropy_coefficient=0.5), PPO_CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * 0.2 * 5.0)
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.1])


def part(tokens: LossTokens, chosen: slice) -> LossTokens:
    fields = ("logprobs", "entropy", "proximal", "behavior", "advantages", "weights", "sequences")
    return LossTokens(**{name: getattr(tokens, name)[chosen] for name in fields})


def test_parts_add_up_to_the_whole():
    whole, stats = policy_loss(case(), CONFIG, PPO_CLIP)
    parts = [policy_loss(part(case(), chosen), CONFIG, PPO_CLIP) for chosen in (slice(0, 2), slice(2, 5))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    assert parts[0][1].merge(parts[1][1]).metrics() == pytest.approx(stats.metrics())


def test_statistics_by_hand():
    _, stats = policy_loss(case(), CONFIG, PPO_CLIP)
    weights = [1.0, 0.5, 1.0, 2.0, 2.0]
    assert stats.metrics() == pytest.approx(
        {
            "ratio_mean": 5.1 / 5,
            "ratio_max": 1.5,
            "clip_fraction_low": 1 / 5,
            "clip_fraction_high": 1 / 5,
            "dual_clip_fraction": 0.0,
            "kl_proximal_policy": sum(u - 1 - math.log(u) for u in (1.1, 1.5, 0.5, 0.5, 1.5)) / 5,
            "behavior_weight_mean": sum(weights) / 5,
            "behavior_weight_max": 4.0,
            "behavior_weight_low_fraction": 0.0,
            "behavior_weight_high_fraction": 1 / 5,
            "effective_sample_size": sum(weights) ** 2 / sum(w * w for w in weights) / 5,
        }
    )


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize(("now", "before"), [(-1.0, -500.0), (-500.0, -1.0)])
def test_absurd_ratios_stay_finite(now, before, advantage, loss):
    config = AlgorithmConfig(loss=loss, reference="initial", kl_coefficient=0.1, behavior_weight_level="sequence")
    tokens = LossTokens(
        logprobs=torch.tensor([now], requires_grad=True),
        entropy=torch.zeros(1),
        proximal=torch.tensor([before]),
        behavior=torch.tensor([now]),
        advantages=torch.tensor([advantage]),
        weights=torch.ones(1),
        sequences=torch.zeros(1, dtype=torch.long),
        reference=torch.tensor([before]),
    )
    assert math.isfinite(policy_loss(tokens, config, choose_objective(config))[0].item())
    assert all(math.isfinite(value) for value in gradient(tokens, config))


def reinforce(tokens: LossTokens, config: AlgorithmConfig) -> torch.Tensor:
    return tokens.advantages * tokens.logprobs


def test_a_users_objective_takes_the_place_of_ours():
    config = AlgorithmConfig(loss=f"{__name__}:reinforce", behavior_weight_high=2.0)
    assert gradient(case(), config) == pytest.approx([-0.4, -0.1, 0.2, -1.2, 0.8])  # -0.2 * weight * advantage


@pytest.mark.parametrize(
    ("objective", "fault"),
    [
        (lambda tokens: tokens.logprobs / 0.0, "returned NaN or infinity"),
        (lambda tokens: tokens.logprobs.detach(), "returned a tensor without a gradient"),
        (lambda _: None, "returned NoneType for 5 loss tokens"),
        (lambda tokens: tokens.logprobs.sum(), r"returned a tensor of shape \(\) for 5 loss tokens"),
    ],
)
def test_a_users_objective_that_cannot_be_trained_is_refused(objective, fault):
    config = AlgorithmConfig(loss=f"{__name__}:reinforce")
    with pytest.raises(ValueError, match=fault):
        policy_loss(case(), config, objective)


def needs_more(tokens, config, temperature):
    return tokens.logprobs * temperature


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:loss", r"cannot be imported \(.*No module"),
        ("math:tau2", r"cannot be imported \(.*no attribute"),
        ("math:tau", "is a float; give a function"),
        (f"{__name__}:needs_more", r"cannot be called with \(tokens, config\)"),
    ],
)
def test_a_users_objective_that_is_none_is_a_config_error(path, reason):
    with pytest.raises(ConfigError, match=rf"algorithm\.loss: '{path}' {reason}"):
        choose_objective(AlgorithmConfig(loss=path))


def test_tensors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"entropy has shape \(1,\), but logprobs \(5,\)"):
        replace(case(), entropy=torch.ones(1))


LOG2 = math.log(2.0)


@pytest.mark.parametrize(("estimate", "by_hand"), [(k1, -LOG2), (k2, LOG2**2 / 2), (k3, 1.0 - LOG2)])
def test_estimates_by_hand(estimate, by_hand):
    assert estimate(torch.tensor(LOG2, dtype=torch.float64)).item() == pytest.approx(by_hand)


@given(st.floats(-15, 15))
def test_k2_and_k3_are_never_negative_and_all_vanish_for_equal_policies(log_ratio):
    value = torch.tensor(log_ratio, dtype=torch.float64)
    assert k2(value) >= 0.0 and k3(value) >= 0.0
    assert [one(torch.tensor(0.0)).item() for one in (k1, k2, k3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expectation_is_the_divergence(estimator):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    expected = (policy * (policy / reference).log()).sum()
    estimates = divergence(policy.log(), reference.log(), estimator)
    assert (policy * estimates).sum().item() == pytest.approx(expected.item(), rel=1e-5)


def test_an_outlier_of_a_divergence_counts_at_most_its_cap():
    policy, reference = torch.tensor([-20.0, -1.0]), torch.tensor([-1.0, -20.0])
    assert divergence(policy, reference, "k3").tolist() == [MAX_KL, MAX_KL]
    assert divergence(policy, reference, "k1").tolist() == [-MAX_KL, MAX_KL]


def test_the_approximate_proximal_policy_by_hand():
    behavior, logprobs = torch.full((3,), -4.0), torch.full((3,), -1.0, requires_grad=True)
    proximal = approximate_proximal(logprobs, behavior, torch.tensor([5, 4, 2], dtype=torch.int32), 5)
    assert proximal.tolist() == pytest.approx([-4.0, -2.5, -1.75])  # ages 0, 1, 3: 0, 1/2, 3/4 of the way
    assert not proximal.requires_grad


def test_the_value_loss_by_hand():
    values = torch.tensor([1.1, 2.0, 2.0], requires_grad=True)
    old, returns = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 3.0, 0.0])
    loss, num_clipped = value_loss(values, old, returns, torch.tensor([1.0, 1.0, 0.5]), clip=0.2)
    # errors 0.9^2; clipped to 1.2: 1.8^2 instead of 1; towards 2 although the return is 0: 2^2 stays
    assert loss.item() == pytest.approx((0.81 + 3.24 + 0.5 * 4.0) / 2)
    assert num_clipped == 1
    loss.backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.0])


def test_no_tokens_make_a_value_loss_of_zero_that_back_propagates():
    nothing = torch.zeros(0, requires_grad=True)
    loss, num_clipped = value_loss(nothing, torch.zeros(0), torch.zeros(0), torch.zeros(0), clip=0.2)
    loss.backward()
    assert (loss.item(), num_clipped) == (0.0, 0)
