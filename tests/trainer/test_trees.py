"""Sequences that share prefixes, each prefix once: what is computed, and that it is exact.

- In random forests a place sees its ancestors and itself, by the tokens alone; there is one for each distinct prefix.
- Log-probabilities, entropies and gradients of random forests are those of each sequence alone, in float64.
- Steps have the loss, metrics and gradient of flat rows, however they are cut, also with a critic, a reference, LoRA
  and recomputed layers; the metrics say what was shared, and what cuts computed twice.
- Cuts compute the fewest positions that contiguous micro-batches can.
- FlexAttention's mask gives what blocks of queries give.
- A model or a teacher that takes no trees trains on flat rows, and a line says why.
"""

import itertools
import logging
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from areal_agent.algorithms.batching import Sample, collate
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.packing import deal, siblings
from areal_agent.algorithms.trees import Tree, in_order
from areal_agent.trainer.attention import Row, segment_attention
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.trainer.model import Policy
from areal_agent.trainer.ranks import ALONE
from areal_agent.trainer.trainer import settled
from areal_agent.trainer.tree_attention import TreeCall
from tests.trainer.families import DENSE, EXACT, VOCAB_SIZE, make
from tests.trainer.lab import CPU, GRADIENT_DESCENT, Lab

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
slowly = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors(lists: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(one) for one in lists]


def prefixes(lists: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(one[: end + 1]) for one in lists for end in range(len(one))}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are cut after three tokens, and blocks hold four."""
    monkeypatch.setattr("areal_agent.algorithms.trees.QUERIES_PER_BLOCK", 3)
    monkeypatch.setattr("areal_agent.algorithms.trees.JOINED_QUERIES", 4)


@slowly
@given(lists=sequences)
def test_a_place_is_a_distinct_prefix_and_sees_its_own_beginnings(small_blocks, lists):
    tree = Tree.of(tensors(lists))
    of_place = {}
    for tokens, places in zip(lists, tree.places, strict=True):
        assert tree.inputs[places].tolist() == tokens
        of_place |= {place: tuple(tokens[: depth + 1]) for depth, place in enumerate(places.tolist())}
    assert sorted(of_place) == list(range(len(tree.inputs)))
    assert len(set(of_place.values())) == len(tree.inputs) == len(prefixes(lists))
    assert tree.depths.tolist() == [len(of_place[place]) - 1 for place in range(len(tree.inputs))]
    longest = max(map(len, lists))
    assert tree.depths[:longest].tolist() == list(range(longest))
    assert [one.start for one in tree.blocks] == [0, *(one.end for one in tree.blocks)][:-1]
    for block in tree.blocks:
        for query, seen in zip(range(block.start, block.end), tree.seen(block, block.keys), strict=True):
            beginnings = {of_place[query][: end + 1] for end in range(len(of_place[query]))}
            assert {of_place[key] for key in block.keys[seen].tolist()} == beginnings


@given(lists=sequences, budget=st.integers(1, 40))
def test_cuts_compute_the_fewest_positions_and_stay_within_the_budget(lists, budget):
    lists = lists[:7]
    order, overlaps = in_order(tensors(lists))
    lists = [lists[index] for index in order]
    lengths = [len(one) for one in lists]
    assert sum(lengths) - sum(overlaps) == len(prefixes(lists))

    def cost(micro_batches: list[list[int]]) -> float:
        sizes = [len(prefixes([lists[index] for index in one])) for one in micro_batches]
        fits = all(size <= budget or len(one) == 1 for one, size in zip(micro_batches, sizes, strict=True))
        return sum(sizes) if fits else math.inf

    found = siblings(lengths, overlaps, budget)
    assert list(itertools.chain(*found)) == list(range(len(lists)))
    every = itertools.product([False, True], repeat=len(lists) - 1)
    bounds = [[0, *(place + 1 for place, cut in enumerate(cuts) if cut), len(lists)] for cuts in every]
    assert cost(found) == min(cost([list(range(*pair)) for pair in itertools.pairwise(one)]) for one in bounds)
    dealt = deal(found, lengths, 2, overlaps)
    assert sorted(index for rank in dealt for one in rank for index in one) == list(range(len(lists)))


@cache
def exact_policy() -> Policy:
    return Policy(make("gpt2", EXACT).double(), CPU)


@st.composite
def samples(draw: Any) -> Sample:
    """Some tokens are in the loss, perhaps none, at temperatures of their own."""
    ids = torch.tensor(draw(st.lists(st.integers(3, 5), min_size=1, max_size=9)))
    is_loss = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    predicting = torch.tensor(is_loss).nonzero().squeeze(1)
    ones = torch.ones(len(predicting), dtype=torch.float64)
    temperatures = [draw(st.sampled_from([0.5, 1.0, 1.3])) for _ in ones]
    return Sample(
        rollout="r",
        inputs=ids,
        predicting=predicting,
        targets=(7 * predicting + draw(st.integers(0, VOCAB_SIZE - 1))) % VOCAB_SIZE,
        temperatures=torch.tensor(temperatures, dtype=torch.float64),
        behavior=-ones,
        versions=ones.int(),
        incarnations=ones.int(),
    )


@slowly
@given(given_samples=st.lists(samples(), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_a_forest_is_computed_and_differentiated_as_each_sequence_alone(small_blocks, given_samples, seed):
    policy = exact_policy()
    weights = torch.randn(
        2, sum(one.num_loss_tokens for one in given_samples), generator=torch.Generator().manual_seed(seed)
    )

    def measured(batches: list[list[Sample]], **layout: bool) -> tuple[Tensor, Tensor]:
        parts = [policy.logprobs_and_entropy(collate(one, CPU, **layout)) for one in batches]
        found = torch.stack([torch.cat(column) for column in zip(*parts, strict=True)])
        parameters = list(policy.named_parameters().values())
        return found, torch.cat([one.flatten() for one in torch.autograd.grad((weights * found).sum(), parameters)])

    for ours, alone in zip(
        measured([given_samples], is_tree=True), measured([[one] for one in given_samples]), strict=True
    ):
        torch.testing.assert_close(ours, alone, atol=1e-9, rtol=1e-9)


REFERRED = {"minibatches": 2, "reference": "initial", "kl_coefficient": 0.1}
CASES = {
    "grpo": ({}, {}),
    "several updates, a reference": (
        {"learning_rate": 1e4},
        {"minibatches": 2, "reference": "initial", "kl_coefficient": 0.1},
    ),
    "critic": ({}, {"preset": "ppo", "minibatches": 1}),
    "lora": ({"lora": LoraConfig(rank=4)}, {"minibatches": 1}),
    "recomputed layers": ({"gradient_checkpointing": True}, {"minibatches": 1}),
}


@pytest.mark.parametrize("budget", [4096, 60])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_flat_rows(model_folder, make_batch, as_input, case, budget):
    settings, algorithm = CASES[case][0], AlgorithmConfig(**CASES[case][1])
    taken = as_input(make_batch(1))
    found: list[tuple[dict[str, float], Tensor]] = []
    for packing in ("tree", "balanced"):
        config = GRADIENT_DESCENT.model_copy(update={**settings, "packing": packing})
        lab = Lab(model_folder, config, algorithm, budget)
        found.append((lab.stepper.train(taken), lab.before - lab.weights()))
    (ours, gradient), (theirs, flat_gradient) = found
    assert (gradient - flat_gradient).norm() <= 1e-5 * flat_gradient.norm()
    layout = {"num_micro_batches", "shared_positions", "repeated_positions"}
    for name in theirs.keys() - layout:
        assert name.startswith("seconds") or ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    shareable = theirs["repeated_positions"]
    assert theirs["shared_positions"] == 0 < ours["shared_positions"] == shareable - ours["repeated_positions"]
    assert (ours["repeated_positions"] > 0) is (budget == 60)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_blocks_of_queries_see(small_blocks):
    tree = Tree.of(tensors([[1, 2, 3, 4], [1, 2, 5], [6, 7], [1, 2, 3, 4, 8, 9]]))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(tree.inputs), 16, generator=generator) for heads in (4, 2, 2))
    call = TreeCall.of(tree)
    assert call.takes(query, value) and not call.takes(query[..., :8], value)
    once, blocks = (
        segment_attention(nn.Identity(), query, key, value, row=Row(tree=tree, one_call=one))[0] for one in (call, None)
    )
    torch.testing.assert_close(once, blocks)


def test_where_no_tree_can_be_had_rows_are_flat_and_a_line_says_why(caplog, monkeypatch):
    everything = "areal_agent.algorithms.trees.Tree.seen"
    monkeypatch.setattr(everything, lambda _, block, keys: (keys <= block.end).expand(block.end - block.start, -1))
    policy = Policy(make("llama", DENSE), CPU)
    assert policy.tree_fault is not None
    caplog.set_level(logging.INFO)
    assert settled(TrainerConfig(), ALONE, [policy]).packing == "balanced"
    assert settled(TrainerConfig(packing="first_fit"), ALONE, [policy]).packing == "first_fit"
    shared = replace(ALONE, context=SimpleNamespace())  # pyright: ignore[reportArgumentType]
    assert settled(TrainerConfig(), shared, [exact_policy()]).packing == "balanced"
    assert settled(TrainerConfig(), ALONE, [exact_policy()]).packing == "tree"
    lines = [one.message for one in caplog.records]
    assert len(lines) == 2 and "they differ by up to" in lines[0] and "context_parallel" in lines[1]
