"""Divergence estimates: 1. by hand; 2. k2 and k3 are never negative, and all are 0 for equal policies; 3. k1 and k3 are
unbiased, and the gradients of k2 and k3 point the policy towards its reference; 4. the approximate proximal policy lies
where the token's age puts it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.losses import approximate_proximal, divergence, k1, k2, k3

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


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_points_away_from_the_reference(estimator):
    policy = torch.tensor([-1.0, -3.0], requires_grad=True)
    divergence(policy, torch.tensor([-2.0, -2.0]), estimator).sum().backward()
    assert policy.grad[0] > 0 > policy.grad[1]


def test_the_approximate_proximal_policy_by_hand():
    behavior, logprobs = torch.full((3,), -4.0), torch.full((3,), -1.0, requires_grad=True)
    proximal = approximate_proximal(logprobs, behavior, torch.tensor([5, 4, 2], dtype=torch.int32), 5)
    assert proximal.tolist() == pytest.approx([-4.0, -2.5, -1.75])  # ages 0, 1, 3: 0, 1/2, 3/4 of the way
    assert not proximal.requires_grad
