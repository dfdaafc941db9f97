"""What every change of the trainer has to pass, on CPU: the cases by number.

1. observations randomised, and made longer: the advantages of actions are identical
2. the reward reaches turn 1 in every estimator, also past a trailing observation
3. a step split over micro-batches has the loss and gradient of the whole
4. gradients do not depend on the order in which sequences are packed, nor on the number of ranks (two of gloo)
5. sequences packed in one row, or padded, have the log-probabilities and gradients of each alone, to 1e-5 in float32
6. CISPO's gradient flows only through log pi; GSPO of a packed batch is that of its sequences one by one
7. log-probability and entropy in chunks are those in one piece, forward and backward
8. an empty loss still back-propagates
9. every sample is scheduled once, within the budget, oversized alone, with equal numbers of micro-batches a rank
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.advantages import STD_EPSILON, token_advantages
from areal_agent.algorithms.batching import Sample, collate, logprobs_and_entropy, sample_of
from areal_agent.algorithms.config import PRESETS, AlgorithmConfig
from areal_agent.algorithms.losses import LossStats, LossTokens, choose_objective, policy_loss
from areal_agent.algorithms.packing import balanced, deal, first_fit
from areal_agent.types import TokenRecord
from tests.trainer.lab import CPU, GRADIENT_DESCENT, Lab

ESTIMATORS = {
    "grpo": AlgorithmConfig(advantage="grpo"),
    "dr_grpo": AlgorithmConfig(advantage="dr_grpo"),
    "rloo": AlgorithmConfig(advantage="rloo"),
    "reinforce_pp": AlgorithmConfig(advantage="reinforce_pp"),
    "gae": AlgorithmConfig(preset="ppo", gae_lambda=0.9),
}
estimator = pytest.mark.parametrize("config", ESTIMATORS.values(), ids=ESTIMATORS)
observation = st.lists(st.integers(0, 300), min_size=1, max_size=30)


def advantages_of_actions(records: list[TokenRecord], config: AlgorithmConfig):
    """One list of numbers a record; the critic of gae says 0.1, 0.2, ..."""
    values = [torch.arange(int(one.loss_mask.sum())) * 0.1 for one in records] if config.critic else None
    scored = token_advantages(records, config, values=values)
    return [one[torch.from_numpy(record.loss_mask)].tolist() for one, record in zip(scored, records, strict=True)]


@estimator
@given(first=observation, second=observation, discount=st.sampled_from([1.0, 0.9]))
def test_case_01_observations_do_not_change_the_advantages_of_actions(make_record, config, first, second, discount):
    def advantages(seen: list[int]) -> list[list[float]]:
        turns = [[(False, [1]), (True, [2, 3])], [(False, seen), (True, [4])], [(False, seen), (True, [5])]]
        records = [make_record(f"s{i}", "g", turns, [0.0, 0.2, float(i)]) for i in range(3)]
        discounted = config.model_copy(update={"discount": discount})
        return advantages_of_actions(records, discounted)

    assert advantages(first) == advantages(second)


@estimator
@pytest.mark.parametrize("trailing", [[], [9, 9, 9]])
def test_case_02_the_reward_reaches_turn_1(make_record, config, trailing):
    turns = [[(False, [1]), (True, [2])], [(False, [3, 3]), (True, [4]), (False, trailing)]]
    records = [make_record(f"s{i}", "g", turns, [0.0, float(i == 0)]) for i in range(4)]
    scored = advantages_of_actions(records, config)
    spread = {"grpo": 0.5 + STD_EPSILON, "reinforce_pp": 0.1875**0.5 + STD_EPSILON}.get(config.advantage, 1.0)
    if config.advantage == "gae":
        assert all(scored[0][0] > other[0] + 1.0 for other in scored[1:])
    else:
        by_hand = 1.0 if config.advantage == "rloo" else 0.75  # one winner of four
        assert scored[0] == pytest.approx([by_hand / spread] * 2, rel=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("budget", [1, 60])
def test_case_03_a_split_step_is_the_whole_step(model_folder, make_batch, as_input, preset, budget):
    given_input = as_input(make_batch(1))
    whole, split = (
        Lab(model_folder, algorithm=AlgorithmConfig(preset=preset, minibatches=1), budget=tokens)
        for tokens in (4096, budget)
    )
    ours, theirs = whole.stepper.train(given_input), split.stepper.train(given_input)
    assert theirs["num_micro_batches"] > ours["num_micro_batches"]
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(split.before - split.weights(), whole.before - whole.weights(), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("packing", ["tree", "balanced", "first_fit", "padded"])
def test_case_04_gradients_do_not_depend_on_the_packing_and_its_order(
    model_folder, make_batch, as_input, preset, packing
):
    batch = make_batch(1)
    shuffled = [batch.records[index] for index in np.random.default_rng(3).permutation(len(batch.records))]
    algorithm = AlgorithmConfig(preset=preset, minibatches=1)
    straight = Lab(model_folder, algorithm=algorithm).gradient(as_input(batch))
    config = GRADIENT_DESCENT.model_copy(update={"packing": packing})
    other = Lab(model_folder, config, algorithm, budget=100).gradient(as_input(batch, shuffled))
    torch.testing.assert_close(other, straight, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("others", [{}, {"is_padded": True}, {"is_tree": True}], ids=["packed", "padded", "tree"])
def test_case_05_sequences_run_together_are_as_each_alone(model_folder, make_batch, others):
    lab = Lab(model_folder)
    records = make_batch(1).records

    def measured(batches: list[list[Sample]], **layout: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.cat([lab.policy.logprobs_and_entropy(collate(one, CPU, **layout))[0] for one in batches])
        weights = torch.linspace(-1.0, 1.0, len(logprobs))
        parameters = list(lab.policy.named_parameters().values())
        gradients = torch.autograd.grad((weights * logprobs).mean(), parameters)
        return logprobs.detach(), torch.cat([one.flatten() for one in gradients])

    samples = [sample_of(record) for record in records]
    together, its_gradient = measured([samples], **others)
    alone, sum_of_gradients = measured([[sample] for sample in samples])
    assert (together - alone).abs().max().item() < 1e-5
    assert (its_gradient - sum_of_gradients).abs().max().item() < 1e-5


def test_case_05_what_stands_before_in_a_packed_row_is_not_seen(model_folder, make_batch):
    lab = Lab(model_folder)
    *others, last = [sample_of(record) for record in make_batch(1).records]
    changed = [replace(one, inputs=(one.inputs + 7) % 61) for one in others]
    with torch.no_grad():
        ours, theirs = (
            lab.policy.logprobs_and_entropy(collate([*before, last], CPU))[0][-last.num_loss_tokens :]
            for before in (others, changed)
        )
    assert torch.equal(ours, theirs)


def random_tokens(sequences: list[int]) -> LossTokens:
    generator = torch.Generator().manual_seed(5)

    def draw() -> torch.Tensor:
        return torch.randn(len(sequences), generator=generator, dtype=torch.float64)

    logprobs = draw() - 2.0
    return LossTokens(
        logprobs=logprobs.requires_grad_(),
        entropy=torch.zeros(len(sequences), dtype=torch.float64),
        proximal=logprobs.detach() + 0.3 * draw(),
        behavior=logprobs.detach() + 0.3 * draw(),
        advantages=draw(),
        weights=draw().abs(),
        sequences=torch.tensor(sequences),
    )


def chosen_tokens(tokens: LossTokens, chosen: torch.Tensor) -> LossTokens:
    fields = ("logprobs", "entropy", "proximal", "behavior", "advantages", "weights")
    parts = {name: getattr(tokens, name)[chosen] for name in fields}
    return LossTokens(**parts, sequences=torch.zeros(int(chosen.sum()), dtype=torch.long))


def test_case_06_the_gradient_of_cispo_flows_only_through_log_pi():
    tokens = random_tokens([0] * 12)
    config = AlgorithmConfig(preset="cispo", proximal="recompute", clip_low=0.2, clip_high=0.3)
    loss, _ = policy_loss(tokens, config, choose_objective(config))
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    ratio = (tokens.logprobs - tokens.proximal).detach().exp().clamp(0.8, 1.3)
    importance = (tokens.proximal - tokens.behavior).exp().clamp_max(5.0)
    torch.testing.assert_close(gradient, -tokens.weights * importance * ratio * tokens.advantages)
    assert (gradient != 0).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_case_06_gspo_packed_is_gspo_of_each_sequence(level):
    tokens = random_tokens([0, 0, 0, 1, 2, 2, 2, 2])
    config = AlgorithmConfig(preset="gspo", clip_low=0.1, clip_high=0.1, behavior_weight_level=level)
    objective = choose_objective(config)
    packed, _ = policy_loss(tokens, config, objective)
    alone = [policy_loss(chosen_tokens(tokens, tokens.sequences == one), config, objective)[0] for one in range(3)]
    torch.testing.assert_close(packed, sum(alone))
    (ours,) = torch.autograd.grad(packed, tokens.logprobs)
    (theirs,) = torch.autograd.grad(sum(alone), tokens.logprobs)
    torch.testing.assert_close(ours, theirs)


def test_case_07_chunks_are_the_whole_forward_and_backward():
    def measured(chunk_size: int | None) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(23, 8, generator=generator).requires_grad_()
        matrix = torch.randn(31, 8, generator=generator).requires_grad_()
        targets = torch.randint(0, 31, (23,), generator=generator)
        temperatures, weights = torch.full((23,), 0.7), torch.linspace(-1, 1, 23)
        logprobs, entropy = logprobs_and_entropy(
            hidden, targets, temperatures, lambda states: states @ matrix.T, vocab_size=31, chunk_size=chunk_size
        )
        mixed = (weights * logprobs).sum() + (weights.flip(0) * entropy).sum()
        return logprobs.detach(), entropy.detach(), *torch.autograd.grad(mixed, [hidden, matrix])

    for chunked, whole in zip(measured(5), measured(None), strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_case_08_an_empty_loss_back_propagates(preset):
    config = AlgorithmConfig(preset=preset, entropy_coefficient=0.1)
    nothing = random_tokens([])
    loss, stats = policy_loss(nothing, config, choose_objective(config))
    loss.backward()
    assert loss.item() == 0.0
    assert nothing.logprobs.grad is not None
    assert stats == LossStats()


@pytest.mark.parametrize("preset", PRESETS)
def test_case_08_records_without_loss_tokens_do_not_matter(model_folder, make_batch, as_input, preset):
    batch = make_batch(1)
    masked = [replace(one, loss_mask=np.zeros_like(one.loss_mask)) if one.branch == 1 else one for one in batch.records]
    without = [one for one in batch.records if one.branch == 0]
    algorithm = AlgorithmConfig(preset=preset)
    ours = Lab(model_folder, algorithm=algorithm).gradient(as_input(batch, masked))
    assert torch.equal(ours, Lab(model_folder, algorithm=algorithm).gradient(as_input(batch, without)))


@pytest.mark.parametrize("split", [balanced, first_fit])
@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    budget=st.integers(1, 1000),
    num_ranks=st.sampled_from([1, 2, 4]),
)
def test_case_09_every_sample_once_equal_micro_batches_a_rank_oversized_alone(split, lengths, budget, num_ranks):
    ranks = deal(split(lengths, budget), lengths, num_ranks)
    assert sorted(index for rank in ranks for part in rank for index in part) == list(range(len(lengths)))
    assert len({len(rank) for rank in ranks}) == 1
    assert all(len(part) <= 1 or sum(lengths[i] for i in part) <= budget for rank in ranks for part in rank)
