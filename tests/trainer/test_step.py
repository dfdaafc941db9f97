"""One train step on a real, tiny model.

- Its gradient is that of the formula, written out over plain forward passes; it depends neither on the split into
  micro-batches nor on the order of records.
- What trails the last action has no part in it. A failed sibling changes the baseline of the others only.
- One minibatch starts at ratio 1; with more, the clip is around the weights at the start of the step.
- Mismatch with the engine's log-probabilities is told, and apart for fresh tokens.
- Without loss tokens, and without a finite gradient, no update is made; with zero advantages one is.
- Rewarded tokens become likelier.
- Layers that are computed again give the same gradient.
- The numbers of the default algorithm on a fixed batch are what they were before there were others.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_agent.algorithms.advantages import token_advantages
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.wire import StepInput
from tests.trainer.lab import GRADIENT_DESCENT, PLAIN, Lab


@pytest.fixture
def lab(model_folder):
    return Lab(model_folder)


def test_the_gradient_is_that_of_the_formula(model_folder, lab, make_batch, as_input):
    given = as_input(make_batch(1))
    reference = Lab(model_folder)
    total = torch.zeros(())
    for record, advantages in zip(given.records, token_advantages(given.records, PLAIN), strict=True):
        logprobs = reference.logprobs(record)
        mask = torch.from_numpy(record.loss_mask)[1:]
        weight = (logprobs.detach() - torch.from_numpy(record.behavior_logprobs)[1:]).exp().clamp(max=5.0)
        total = total - (weight * advantages[1:] * logprobs)[mask].sum()
    (total / sum(int(record.loss_mask.sum()) for record in given.records)).backward()
    expected = torch.cat([one.grad.flatten() for one in reference.policy.named_parameters().values()])
    torch.testing.assert_close(lab.gradient(given), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("budget", [1, 60, 200])
def test_the_gradient_does_not_depend_on_the_split(model_folder, lab, make_batch, as_input, budget):
    given = as_input(make_batch(1))
    split = Lab(model_folder, budget=budget).gradient(given)
    torch.testing.assert_close(split, lab.gradient(given), atol=1e-6, rtol=1e-4)


def test_the_gradient_does_not_depend_on_the_order_of_records(model_folder, lab, make_batch, as_input):
    batch = make_batch(1)
    shuffled = [batch.records[index] for index in np.random.default_rng(3).permutation(len(batch.records))]
    other = Lab(model_folder, budget=100).gradient(as_input(batch, shuffled))
    torch.testing.assert_close(other, lab.gradient(as_input(batch)), atol=1e-6, rtol=1e-4)


def test_what_trails_the_last_action_has_no_part(model_folder, lab, make_batch, as_input):
    batch = make_batch(1)
    rng = np.random.default_rng(0)
    changed = []
    for record in batch.records:
        ids = record.token_ids.copy()
        end = int(np.flatnonzero(record.loss_mask)[-1]) + 1
        ids[end:] = rng.integers(0, 61, len(ids) - end)
        changed.append(replace(record, token_ids=ids))
    assert torch.equal(lab.gradient(as_input(batch)), Lab(model_folder).gradient(as_input(batch, changed)))


def test_a_failed_sibling_is_the_same_as_a_smaller_group(model_folder, lab, make_batch, as_input):
    batch = make_batch(1)
    failed = batch.records[0].session_id
    rest = [record for record in batch.records if record.session_id != failed]
    given = as_input(batch, rest)
    assert failed in given.rewards  # its reward is known and has no record: it must not count
    without = StepInput(
        step=1, records=rest, rewards={name: reward for name, reward in given.rewards.items() if name != failed}
    )
    assert torch.equal(lab.gradient(given), Lab(model_folder).gradient(without))


def test_one_minibatch_starts_at_ratio_one(lab, make_batch, as_input):
    metrics = lab.stepper.train(as_input(make_batch(1)))
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["num_updates"]) == (1.0, 1.0, 1)


def test_later_minibatches_are_clipped_around_the_start_of_the_step(model_folder, make_batch, as_input):
    config = TrainerConfig(learning_rate=1e-2)
    given = as_input(make_batch(1))
    lab = Lab(model_folder, config, AlgorithmConfig(minibatches=3))
    metrics = lab.stepper.train(given)
    assert metrics["num_updates"] == 3
    assert metrics["ratio_max"] > 1.3
    assert metrics["clip_fraction_low"] + metrics["clip_fraction_high"] > 0.0
    assert metrics["num_loss_tokens"] == sum(int(record.loss_mask.sum()) for record in given.records)
    # the proximal policy is that of the start, for all minibatches: its distance to the engine is as in one minibatch
    single = Lab(model_folder).stepper.train(given)
    assert metrics["logp_diff_mean"] == pytest.approx(single["logp_diff_mean"], rel=1e-5)


def test_there_are_no_more_minibatches_than_rollouts(model_folder, make_batch, as_input):
    lab = Lab(model_folder, algorithm=AlgorithmConfig(minibatches=100))
    assert lab.stepper.train(as_input(make_batch(1, num_groups=2)))["num_updates"] == 8


def test_mismatch_is_told_and_apart_for_fresh_tokens(lab, make_batch, as_input):
    batch = make_batch(1)
    exact = [
        np.where(record.loss_mask, np.append(0.0, lab.logprobs(record).detach().numpy()), 0.0).astype(np.float32)
        for record in batch.records
    ]
    fresh = [replace(r, behavior_logprobs=b) for r, b in zip(batch.records, exact, strict=True)]
    stale = replace(
        fresh[0],
        behavior_logprobs=np.where(fresh[0].loss_mask, exact[0] + 0.5, 0.0).astype(np.float32),
        versions=fresh[0].versions - 1,
    )
    metrics = lab.stepper.train(as_input(batch, [stale, *fresh[1:]]))
    num_tokens, num_stale = (metrics["num_loss_tokens"], int(stale.loss_mask.sum()))
    assert metrics["logp_diff_fresh_max"] < 1e-5
    assert metrics["num_fresh_tokens"] == num_tokens - num_stale
    assert metrics["logp_diff_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logp_diff_mean"] == pytest.approx(0.5 * num_stale / num_tokens, rel=1e-3)
    assert metrics["mismatch_kl"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) * num_stale / num_tokens, rel=1e-3)


def test_tokens_of_a_dead_incarnation_are_not_fresh(lab, make_batch, as_input):
    first, *others = (batch := make_batch(1)).records
    dead = replace(first, incarnations=np.where(first.loss_mask, 0, -1).astype(np.int32))
    alive = [replace(one, incarnations=np.where(one.loss_mask, 1, -1).astype(np.int32)) for one in others]
    metrics = lab.stepper.train(replace(as_input(batch, [dead, *alive]), incarnation=1))
    assert metrics["num_fresh_tokens"] == sum(int(one.loss_mask.sum()) for one in alive)


def test_rewards_are_counted_once_a_rollout(lab, make_batch, as_input):
    batch = make_batch(1, num_groups=2)  # rewards 1 0 0 1 | 0 0 1 0
    metrics = lab.stepper.train(as_input(batch))
    assert (metrics["num_rollouts"], metrics["num_records"]) == (8, 10)
    assert metrics["reward_mean"] == pytest.approx(3 / 8)
    assert metrics["flat_group_fraction"] == 0.0


@pytest.mark.parametrize("records", ["none", "masked"])
def test_without_loss_tokens_no_update_is_made(lab, make_batch, as_input, records):
    batch = make_batch(1)
    masked = [replace(record, loss_mask=np.zeros_like(record.loss_mask)) for record in batch.records]
    metrics = lab.stepper.train(as_input(batch, masked if records == "masked" else []))
    assert (metrics["num_updates"], metrics["num_loss_tokens"]) == (0, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(lab.weights(), lab.before)


def test_zero_advantages_make_an_update_of_gradient_zero(lab, make_batch):
    batch = make_batch(1)
    flat = [replace(record, turn_rewards=np.ones(2, dtype=np.float32) * [0, 1]) for record in batch.records]
    given = StepInput(step=1, records=flat, rewards={record.session_id: 1.0 for record in flat})
    metrics = lab.stepper.train(given)
    assert (metrics["num_updates"], metrics["grad_norm"], metrics["flat_group_fraction"]) == (1, 0.0, 1.0)
    assert torch.equal(lab.weights(), lab.before)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(lab, make_batch, as_input):
    given = as_input(make_batch(1))
    poison = np.full(2, math.nan, dtype=np.float32)
    poisoned = replace(given, records=[replace(record, turn_rewards=poison) for record in given.records])
    metrics = lab.stepper.train(poisoned)
    assert (metrics["num_updates"], metrics["num_skipped_updates"]) == (0, 1)
    assert torch.equal(lab.weights(), lab.before)


def test_a_step_that_failed_midway_leaves_no_gradient_behind(model_folder, lab, make_batch, as_input):
    given = as_input(make_batch(1))
    for one in lab.policy.model.parameters():
        one.grad = torch.ones_like(one)  # as an interrupted accumulation leaves it
    assert torch.equal(lab.gradient(given), Lab(model_folder).gradient(given))


def test_rewarded_tokens_become_likelier(model_folder, make_batch, as_input):
    batch = make_batch(1, num_groups=2)
    given = as_input(batch)
    lab = Lab(model_folder, TrainerConfig(learning_rate=3e-3))
    good, bad = (
        [record for record in batch.records if given.rewards[record.session_id] == reward] for reward in (1.0, 0.0)
    )

    def mean(records) -> float:
        with torch.no_grad():
            return float(torch.cat([lab.logprobs(one)[torch.from_numpy(one.loss_mask)[1:]] for one in records]).mean())

    before = mean(good) - mean(bad)
    for _ in range(5):
        lab.stepper.train(given)
    assert mean(good) - mean(bad) > before + 0.5


@pytest.mark.parametrize(
    ("algorithm", "loss", "grad_norm", "moved"),
    [
        (AlgorithmConfig(normalize_by_std=False), -0.07053784839808941, 2.097564458847046, 17.29209327697754),
        (AlgorithmConfig(minibatches=3), -0.061229960372050606, 6.742499828338623, 29.085716247558594),
    ],
)
def test_the_default_algorithm_gives_the_numbers_it_gave_at_first(
    model_folder, make_batch, as_input, algorithm, loss, grad_norm, moved
):
    lab = Lab(model_folder, TrainerConfig(learning_rate=1e-3), algorithm)
    metrics = lab.stepper.train(as_input(make_batch(1)))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    assert (lab.weights() - lab.before).abs().sum().item() == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize("algorithm", [PLAIN, AlgorithmConfig(preset="ppo", reference="initial", kl_coefficient=0.1)])
def test_recomputed_layers_have_the_same_gradient_and_run_twice(model_folder, make_batch, as_input, algorithm):
    given = as_input(make_batch(1))
    plain, recomputed = (
        Lab(model_folder, GRADIENT_DESCENT.model_copy(update={"gradient_checkpointing": is_on}), algorithm)
        for is_on in (False, True)
    )
    calls = {id(lab): count_calls(lab.policy.model.base_model.layers[0].mlp) for lab in (plain, recomputed)}
    gradients = [lab.gradient(given) for lab in (plain, recomputed)]
    assert torch.equal(*gradients)
    if algorithm.critic:
        critics = [torch.cat([one.flatten() for one in lab.critic.model.parameters()]) for lab in (plain, recomputed)]
        assert torch.equal(*critics)
    assert len(calls[id(recomputed)]) == len(calls[id(plain)]) + 1  # one micro-batch goes backward


def count_calls(module: torch.nn.Module) -> list[int]:
    """Grows by one each time it begins; one that is computed again need not end."""
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls
