"""Train steps of every algorithm on a real, tiny model.

- The gradient is that of the formula, written out over plain forward passes, and does not depend on the
  micro-batches.
- Tokens after the last action have no part in it. A failed sibling changes only the baseline of the others.
- One minibatch starts at ratio 1; with more, the clip is around the weights at the start of the step.
- Mismatch with the engine's log-probabilities is reported whatever the ratio is taken to, separately for fresh
  tokens, and without what the step's own updates change.
- Without loss tokens, a finite gradient or an advantage that is not zero no update is made, but a term of the loss that
  does not need advantages still makes one.
- With each preset rewarded tokens become likelier. Recomputed layers give the same gradient.
- The default algorithm gives the same numbers on a fixed batch as it gave at first.
- A critic learns returns; a reference pulls the policy, by the loss or by the rewards; the entropy bonus raises
  entropy.
- Truncated conversations may be masked; their rewards stay in the baseline of their group.
- Named parts of the reward count with their weights. test_custom_loss.py has a user's own loss and advantage.
- What is kept of tokens is what the loss was computed from, with several minibatches too.
- A checkpoint with critic and reference goes on exactly; one that lacks what the algorithm asks for is refused.
- The operations that MFU is made of are those that torch counts, and of attention those of tokens that are seen.
- A sequence longer than a micro-batch goes alone, or is refused at the start with `trainer.oversized: refuse`.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from areal_agent.algorithms.advantages import token_advantages
from areal_agent.algorithms.batching import collate, sample_of
from areal_agent.algorithms.config import PRESETS, AlgorithmConfig
from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.observe.token_records import FOLDER, read_seen
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.trainer.wire import StepInput
from tests.trainer.lab import CPU, GRADIENT_DESCENT, PLAIN, Lab

LEARNING = TrainerConfig(learning_rate=3e-3)
REFERRED = {"reference": "initial", "kl_coefficient": 0.5}


@pytest.fixture
def lab(model_folder):
    return Lab(model_folder)


def test_the_gradient_is_that_of_the_formula(model_folder, lab, given):
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


def test_one_minibatch_starts_at_ratio_one_and_rewards_are_counted_once_a_rollout(lab, make_batch, as_input):
    metrics = lab.stepper.train(as_input(make_batch(1, num_groups=2)))  # rewards 1 0 0 1 | 0 0 1 0
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["num_updates"]) == (1.0, 1.0, 1)
    assert (metrics["num_rollouts"], metrics["num_records"]) == (8, 10)
    assert (metrics["reward_mean"], metrics["flat_group_fraction"]) == (pytest.approx(3 / 8), 0.0)


def test_later_minibatches_are_clipped_around_the_start_of_the_step(model_folder, given):
    config = TrainerConfig(learning_rate=1e-2)
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
    metrics = lab.stepper.train(as_input(make_batch(1, num_groups=2)))
    assert metrics["num_updates"] + metrics["num_empty_updates"] == 8  # of some rollouts all tokens are clipped


def test_mismatch_is_told_and_apart_for_fresh_tokens(lab, make_batch, as_input):
    batch = make_batch(1)
    first, *fresh = lab.exact(batch.records)
    stale = replace(first, behavior_logprobs=first.behavior_logprobs + np.float32(0.5), versions=first.versions - 1)
    metrics = lab.stepper.train(as_input(batch, [stale, *fresh]))
    num_tokens, num_stale = (metrics["num_loss_tokens"], int(stale.loss_mask.sum()))
    assert metrics["logp_diff_fresh_max"] < 1e-5
    assert metrics["num_fresh_tokens"] == num_tokens - num_stale
    assert metrics["logp_diff_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logp_diff_mean"] == pytest.approx(0.5 * num_stale / num_tokens, rel=1e-3)
    assert metrics["kl_behavior_proximal"] == pytest.approx(
        (math.exp(-0.5) - 1 + 0.5) * num_stale / num_tokens, rel=1e-3
    )


def test_tokens_of_a_dead_incarnation_are_not_fresh(lab, make_batch, as_input):
    first, *others = (batch := make_batch(1)).records
    dead = replace(first, incarnations=np.where(first.loss_mask, 0, -1).astype(np.int32))
    alive = [replace(one, incarnations=np.where(one.loss_mask, 1, -1).astype(np.int32)) for one in others]
    metrics = lab.stepper.train(replace(as_input(batch, [dead, *alive]), incarnation=1))
    assert metrics["num_fresh_tokens"] == sum(int(one.loss_mask.sum()) for one in alive)


@pytest.mark.parametrize("records", ["none", "masked"])
def test_without_loss_tokens_no_update_is_made(lab, make_batch, as_input, records):
    batch = make_batch(1)
    masked = [replace(record, loss_mask=np.zeros_like(record.loss_mask)) for record in batch.records]
    metrics = lab.stepper.train(as_input(batch, masked if records == "masked" else []))
    assert (metrics["num_updates"], metrics["num_loss_tokens"]) == (0, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(lab.weights(), lab.before)


@pytest.fixture
def flat(make_batch):
    """A step whose groups are all alike: all rollouts earn 0.1 by their second turn."""
    records = [replace(one, turn_rewards=np.array([0, 0.1], dtype=np.float32)) for one in make_batch(2).records]
    return StepInput(step=2, records=records, rewards={one.session_id: 0.1 for one in records})


@pytest.mark.parametrize("options", [{}, {"preset": "rloo"}, {"advantage": "reinforce_pp"}, {"discount": 0.83}])
def test_groups_that_are_all_alike_make_no_update(model_folder, given, flat, options):
    lab = Lab(model_folder, TrainerConfig(learning_rate=1e-3), AlgorithmConfig(**options))
    lab.stepper.train(given)  # so that there is momentum
    before = lab.weights()
    metrics = lab.stepper.train(flat)
    assert (metrics["num_updates"], metrics["num_empty_updates"], metrics["num_skipped_updates"]) == (0, 1, 0)
    assert (metrics["grad_norm"], metrics["flat_group_fraction"]) == (0.0, 1.0)
    assert torch.equal(lab.weights(), before)


@pytest.mark.parametrize("options", [{"entropy_coefficient": 0.1}, {"minibatches": 2, **REFERRED}])
def test_other_terms_of_the_loss_update_also_where_all_groups_are_alike(
    model_folder, other_folder, given, flat, options
):
    lab = Lab(model_folder, LEARNING, AlgorithmConfig(**options), reference=other_folder)
    assert lab.stepper.train(flat)["num_empty_updates"] == 0
    assert not torch.equal(lab.weights(), lab.before)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(lab, given):
    poison = np.full(2, math.nan, dtype=np.float32)
    poisoned = replace(given, records=[replace(record, turn_rewards=poison) for record in given.records])
    metrics = lab.stepper.train(poisoned)
    assert (metrics["num_updates"], metrics["num_skipped_updates"]) == (0, 1)
    assert torch.equal(lab.weights(), lab.before)


def test_a_step_that_failed_midway_leaves_no_gradient_behind(model_folder, lab, given):
    for one in lab.policy.model.parameters():
        one.grad = torch.ones_like(one)  # as an interrupted accumulation leaves it
    assert torch.equal(lab.gradient(given), Lab(model_folder).gradient(given))


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
    metrics = lab.stepper.train(as_input(make_batch(1, num_shared=0)))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    assert (lab.weights() - lab.before).abs().sum().item() == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [(PLAIN, None), (AlgorithmConfig(preset="ppo", **REFERRED), None), (PLAIN, LoraConfig(rank=4))],
)
def test_recomputed_layers_have_the_same_gradient_and_run_twice(model_folder, given, algorithm, lora):
    plain, recomputed = (
        Lab(
            model_folder, GRADIENT_DESCENT.model_copy(update={"gradient_checkpointing": is_on, "lora": lora}), algorithm
        )
        for is_on in (False, True)
    )
    calls = {id(lab): count_calls(lab.policy.model.base_model.layers[0].mlp) for lab in (plain, recomputed)}
    gradients = [lab.gradient(given) for lab in (plain, recomputed)]
    assert gradients[0].abs().max() > 0
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


@pytest.mark.parametrize("preset", PRESETS)
def test_rewarded_tokens_become_likelier(model_folder, make_batch, as_input, preset):
    given = as_input(make_batch(1, num_groups=2))
    lab = Lab(model_folder, LEARNING, AlgorithmConfig(preset=preset))
    before = lab.gap(given)
    for _ in range(5):
        lab.stepper.train(given)
    assert lab.gap(given) > before + 0.5


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_does_not_depend_on_the_split(model_folder, given, preset):
    algorithm = AlgorithmConfig(preset=preset, minibatches=1, **REFERRED, entropy_coefficient=0.01)
    whole = Lab(model_folder, algorithm=algorithm).gradient(given)
    split = Lab(model_folder, algorithm=algorithm, budget=30).gradient(given)
    torch.testing.assert_close(split, whole, atol=2e-6, rtol=1e-4)


def test_a_critic_learns_returns(model_folder, given):
    lab = Lab(model_folder, TrainerConfig(learning_rate=1e-6), AlgorithmConfig(preset="ppo", critic_learning_rate=3e-3))
    told = [lab.stepper.train(given) for _ in range(12)]
    assert told[0]["value_loss"] == pytest.approx(mean_square_return(given) / 2)  # every value is 0 at first
    assert told[-1]["value_loss"] < 0.5 * told[0]["value_loss"]
    assert told[0]["value_explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert told[-1]["value_explained_variance"] > 0.3


def mean_square_return(given) -> float:
    counts = {one.session_id: 0 for one in given.records}
    for one in given.records:
        counts[one.session_id] += int(one.loss_mask.sum())
    return sum(count * given.rewards[name] ** 2 for name, count in counts.items()) / sum(counts.values())


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
@pytest.mark.parametrize("paid_in", ["loss", "reward"])
def test_a_reference_that_is_the_policy_changes_nothing(model_folder, given, preset, paid_in):
    referred = Lab(model_folder, algorithm=AlgorithmConfig(preset=preset, **REFERRED, kl_in=paid_in))
    plain = Lab(model_folder, algorithm=AlgorithmConfig(preset=preset))
    torch.testing.assert_close(referred.gradient(given), plain.gradient(given), atol=2e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def other_folder(model_folder, tmp_path_factory) -> Path:
    """The model with somewhat different weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model_folder, folder)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    moved = {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("options", [{}, {"kl_in": "reward", "kl_estimator": "k1"}])
def test_the_policy_is_pulled_to_its_reference(model_folder, other_folder, make_batch, as_input, options):
    flat = replace(as_input(make_batch(1)), rewards={})
    records = [replace(one, turn_rewards=0 * one.turn_rewards) for one in flat.records]
    given = replace(flat, records=records, rewards={one.session_id: 0.0 for one in records})
    algorithm = AlgorithmConfig(advantage="reinforce_pp", whiten=False, **{**REFERRED, **options})
    lab = Lab(model_folder, TrainerConfig(learning_rate=1e-3), algorithm, reference=other_folder)
    told = [lab.stepper.train(given)["kl_policy_reference"] for _ in range(8)]
    assert 0.0 < told[-1] < 0.8 * told[0]


def test_the_entropy_bonus_raises_entropy(model_folder, given):
    labs = [Lab(model_folder, LEARNING, AlgorithmConfig(entropy_coefficient=one)) for one in (0.0, 1.0)]
    without, with_bonus = ([lab.stepper.train(given)["entropy"] for _ in range(6)] for lab in labs)
    assert with_bonus[0] == without[0]
    assert with_bonus[-1] > without[-1] + 0.05


def test_masked_truncated_conversations_count_in_the_baseline_alone(model_folder, make_batch, as_input):
    given = as_input(make_batch(1))
    cut, *others = given.records
    ended = np.arange(len(cut.turn_rewards)) == len(cut.turn_rewards) - 1
    told = replace(given, records=[replace(cut, truncated=ended), *others])
    by_hand = replace(given, records=[replace(cut, loss_mask=np.zeros_like(cut.loss_mask)), *others])
    masking = Lab(model_folder, algorithm=AlgorithmConfig(truncated="mask"))
    assert torch.equal(masking.gradient(told), Lab(model_folder).gradient(by_hand))
    assert torch.equal(Lab(model_folder).gradient(told), Lab(model_folder).gradient(given))


def test_named_parts_count_with_their_weights(model_folder, make_batch, as_input):
    batch = make_batch(1)
    parts = {one.session_id: {"style": float(number)} for number, one in enumerate(batch.trained)}
    given = replace(as_input(batch), parts=parts)
    totals = {name: reward + 0.5 * parts[name]["style"] for name, reward in given.rewards.items()}
    by_hand = [
        replace(one, turn_rewards=np.array([0.0, totals[one.session_id]], dtype=np.float32)) for one in batch.records
    ]
    weighted = Lab(model_folder, algorithm=AlgorithmConfig(reward_parts={"style": 0.5})).gradient(given)
    expected = Lab(model_folder).gradient(replace(given, records=by_hand, rewards=totals, parts={}))
    assert torch.equal(weighted, expected)


@pytest.mark.parametrize("proximal", ["behavior", "approximate"])
def test_mismatch_is_told_whatever_the_ratio_is_taken_to(model_folder, given, proximal):
    plain = Lab(model_folder, algorithm=AlgorithmConfig(minibatches=2)).stepper.train(given)
    told = Lab(model_folder, algorithm=AlgorithmConfig(minibatches=2, proximal=proximal)).stepper.train(given)
    assert told["logp_diff_mean"] > 0.5
    assert plain["logp_diff_mean"] > 0.5
    assert told["behavior_weight_max"] == pytest.approx(1.0)  # fresh tokens: the approximation is the behaviour policy


@pytest.mark.parametrize("proximal", ["recompute", "behavior", "approximate"])
def test_what_an_update_changed_is_no_mismatch(model_folder, make_batch, as_input, proximal):
    config = TrainerConfig(learning_rate=1e-2)
    lab = Lab(model_folder, config, AlgorithmConfig(minibatches=3, proximal=proximal))
    batch = make_batch(1)
    metrics = lab.stepper.train(as_input(batch, lab.exact(batch.records)))
    assert metrics["num_fresh_tokens"] > 0
    assert metrics["logp_diff_fresh_max"] < 1e-5


@pytest.fixture
def load_trainer(open_trainer):
    config = TrainerConfig(learning_rate=1e-3, warmup_fraction=0.5)
    return lambda folder, algorithm: open_trainer(folder, config, algorithm, num_steps=20)


@pytest.mark.parametrize(("asked", "missing"), [({"preset": "ppo"}, "critic"), ({"reference": "initial"}, "reference")])
def test_a_checkpoint_without_what_the_algorithm_asks_for_is_refused(
    load_trainer, model_folder, tmp_path, asked, missing
):
    saved = load_trainer(model_folder, AlgorithmConfig()).save(tmp_path / "checkpoints", step=0, incarnation=0)
    with pytest.raises(ConfigError, match=f"was saved without a {missing}"):
        load_trainer(saved.path, AlgorithmConfig.model_validate(asked))


def test_it_goes_alone_and_is_trained(model_folder, given):
    metrics = Lab(model_folder, budget=1).stepper.train(given)
    assert metrics["num_micro_batches"] == len(given.records)
    assert metrics["num_loss_tokens"] == sum(int(record.loss_mask.sum()) for record in given.records)


def config(**trainer: object) -> Config:
    return Config.parse({"tasks": "a:b", "engine": {"max_context_tokens": 2049}, "trainer": trainer})


def test_a_config_under_which_there_can_be_one_is_refused():
    assert config(tokens_per_micro_batch=2047).trainer.oversized == "alone"
    assert config(tokens_per_micro_batch=2048, oversized="refuse").trainer.tokens_per_micro_batch == 2048
    with pytest.raises(ConfigError, match=r"max_context_tokens = 2049 does not fit into .* = 2047; raise that"):
        config(tokens_per_micro_batch=2047, oversized="refuse")
    # with a gateway elsewhere nobody can tell
    online = {"rollout": {"gateway_url": "http://127.0.0.1:1"}, "engine": {"url": "http://127.0.0.1:2"}}
    with pytest.raises(ConfigError, match=r"trainer\.oversized is 'refuse', which needs the run's own engine"):
        Config.parse({**online, "trainer": {"oversized": "refuse"}})


@pytest.mark.parametrize("minibatches", [1, 3])
def test_what_is_kept_of_tokens_is_what_the_loss_was_computed_from(
    model_folder, open_trainer, given, tmp_path, minibatches
):
    algorithm = PLAIN.model_copy(update={"minibatches": minibatches})
    kept = {"token_records": tmp_path / FOLDER, "token_records_share": 1.0}
    start = {id(record): Lab(model_folder).logprobs(record).detach() for record in given.records}
    open_trainer(model_folder, GRADIENT_DESCENT, algorithm, **kept).train_step(given)
    ratios = []
    for record, advantages in zip(given.records, token_advantages(given.records, algorithm), strict=True):
        seen = read_seen(tmp_path, given.step, record.session_id)[record.branch]
        assert seen.positions.tolist() == np.flatnonzero(record.loss_mask).tolist()
        at_start = start[id(record)][torch.from_numpy(seen.positions).long() - 1]
        torch.testing.assert_close(torch.from_numpy(seen.proximal), at_start, atol=1e-5, rtol=1e-5)
        assert seen.advantages.tolist() == advantages[seen.positions].tolist()
        ratios.append(np.exp(seen.logprobs - seen.proximal))
    moved = np.abs(np.concatenate(ratios) - 1).max()
    assert moved < 1e-5 if minibatches == 1 else moved > 1e-3


def test_the_operations_of_a_micro_batch_are_those_that_torch_counts(lab, given):
    batch = collate([sample_of(one) for one in given.records], CPU)
    work = lab.policy.work
    with FlopCounterMode(display=False) as counted:
        lab.policy.logprobs_and_entropy(batch)[0].sum().backward()
    products = sum(
        number
        for operation, number in counted.get_flop_counts()["Global"].items()
        if str(operation).startswith(("aten.mm", "aten.addmm"))
    )
    of_attention = 12 * 2 * 32 * sum(length * (length + 1) // 2 for length in batch.segments)
    assert work.count(batch) - of_attention == products
