"""The critic's loss, by hand: unclipped, clipped where that is worse, and no gradient through what is clipped."""

import pytest
import torch

from areal_agent.algorithms.losses import value_loss


def test_the_value_loss_by_hand():
    values = torch.tensor([1.1, 2.0, 2.0], requires_grad=True)
    old, returns = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 3.0, 0.0])
    loss, num_clipped = value_loss(values, old, returns, torch.tensor([1.0, 1.0, 0.5]), clip=0.2)
    # errors 0.9^2; clipped to 1.2: 1.8^2 instead of 1; towards 2 although the return is 0: 2^2 stays
    assert loss.item() == pytest.approx((0.81 + 3.24 + 0.5 * 4.0) / 2)
    assert num_clipped == 1
    loss.backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.0])


def test_no_tokens_make_a_loss_of_zero_that_back_propagates():
    nothing = torch.zeros(0, requires_grad=True)
    loss, num_clipped = value_loss(nothing, torch.zeros(0), torch.zeros(0), torch.zeros(0), clip=0.2)
    loss.backward()
    assert (loss.item(), num_clipped) == (0.0, 0)
