"""Which sequences go through the model together, and what each of their tokens weighs.

- Algorithm 1 of the paper, by hand; first-fit decreasing, by hand; padded rows are of similar lengths.
- Each puts every sequence in one micro-batch, within the budget or alone, whatever order they come in.
- First-fit decreasing never needs more than twice the micro-batches that the tokens would fill.
- Dealt to ranks, every sequence is on one rank, once; ranks have equally many micro-batches, none larger than before;
  one is empty only where there are fewer sequences than ranks.
- Token weights of each aggregation, by hand; those of a mean add up to one.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.packing import MAX_PADDING, alike, balanced, deal, first_fit, token_weights

Split = Callable[[Sequence[int], int], list[list[int]]]
every_split = pytest.mark.parametrize("split", [balanced, first_fit, alike])
lengths = st.lists(st.integers(1, 300), max_size=60)
budgets = st.integers(1, 1000)


def cost(split: Split, micro_batch: list[int], of: Sequence[int]) -> int:
    """Tokens that go through the model, padding included."""
    inside = [of[index] for index in micro_batch]
    return len(inside) * max(inside) if split is alike else sum(inside)


def test_algorithm_1_fills_the_fitting_micro_batch_with_the_fewest_sequences():
    # 9 and 6 open the two; 5 fits beside 6 alone; 3 beside 9, which has fewer; 2 fits beside 6 and 5 alone, then 1 too
    assert balanced([9, 6, 5, 3, 2, 1], 13, at_least=2) == [[0, 3, 5], [1, 2, 4]]


def test_first_fit_fills_the_first_with_room_and_padded_rows_are_of_like_lengths():
    assert first_fit([9, 6, 5, 3, 2, 1], 13) == [[0, 3, 5], [1, 2, 4]]
    assert first_fit([4, 4, 2, 2, 1], 6) == [[0, 2], [1, 3], [4]]
    assert alike([100, 50, 98, 49, 10], 1000) == [[0, 2], [1, 3], [4]]
    assert alike([100, 100, 100], 200) == [[0, 1], [2]]


@every_split
@given(lengths=lengths, budget=budgets)
def test_every_sequence_is_in_one_micro_batch_within_the_budget_or_alone(split, lengths, budget):
    micro_batches = split(lengths, budget)
    assert sorted(index for one in micro_batches for index in one) == list(range(len(lengths)))
    assert all(len(one) == 1 or cost(split, one, lengths) <= budget for one in micro_batches)


@every_split
@given(lengths=lengths, budget=budgets, data=st.data())
def test_the_order_of_sequences_does_not_matter(split, lengths, budget, data):
    order = data.draw(st.permutations(range(len(lengths))))

    def as_lengths(sequences: list[int]) -> list[list[int]]:
        return [[sequences[index] for index in one] for one in split(sequences, budget)]

    assert as_lengths(lengths) == as_lengths([lengths[index] for index in order])


@given(lengths=lengths, budget=budgets, at_least=st.integers(1, 8))
def test_algorithm_1_opens_as_many_as_are_asked_for(lengths, budget, at_least):
    assert len(balanced(lengths, budget, at_least=at_least)) >= min(at_least, len(lengths))


@given(lengths=lengths, budget=st.integers(300, 2000))
def test_first_fit_decreasing_needs_few_micro_batches(lengths, budget):
    assert len(first_fit(lengths, budget)) <= math.ceil(sum(lengths) / budget) * 2


@given(lengths=lengths, budget=budgets)
def test_the_padding_of_a_row_is_bounded(lengths, budget):
    for one in alike(lengths, budget):
        assert min(lengths[i] for i in one) >= (1 - MAX_PADDING) * max(lengths[i] for i in one)


@every_split
@given(lengths=lengths, budget=budgets, num_ranks=st.integers(1, 5))
def test_ranks_share_all_sequences_in_equally_many_micro_batches(split, lengths, budget, num_ranks):
    micro_batches = split(lengths, budget)
    ranks = deal(micro_batches, lengths, num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(one) for one in ranks}) == 1
    dealt = [part for rank in ranks for part in rank]
    assert sorted(index for part in dealt for index in part) == list(range(len(lengths)))
    wholes = [set(one) for one in micro_batches]
    assert all(any(set(part) <= whole for whole in wholes) for part in dealt if part)
    if any(not part for part in dealt):
        assert all(len(part) <= 1 for part in dealt)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), budget=budgets, num_ranks=st.integers(1, 5))
def test_what_runs_at_the_same_time_is_of_neighbouring_size(lengths, budget, num_ranks):
    ranks = deal(first_fit(lengths, budget), lengths, num_ranks)
    turns = [[sum(lengths[i] for i in part) for part in turn] for turn in zip(*ranks, strict=True)]
    assert all(min(ahead) >= max(behind) for ahead, behind in itertools.pairwise(turns))


COUNTS, ROLLOUTS = [1, 3, 4, 0], ["a", "a", "b", "c"]


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (AlgorithmConfig(), [1 / 8] * 3),
        (AlgorithmConfig(aggregation="sequence_mean"), [1 / 8] * 3),
        (AlgorithmConfig(aggregation="constant", aggregation_tokens=10), [1 / 20] * 3),
    ],
)
def test_weights_by_hand(config, weights):
    assert token_weights(COUNTS, ROLLOUTS, config)[:3] == weights
    if config.aggregation == "sequence_mean":
        assert token_weights([1, 2, 5], ["a", "b", "b"], config) == [1 / 2, 1 / 14, 1 / 14]


@given(
    branches=st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd")), min_size=1),
    aggregation=st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_the_weights_of_a_mean_add_up_to_one(branches, aggregation):
    counts, rollouts = [count for count, _ in branches], [name for _, name in branches]
    weights = token_weights(counts, rollouts, AlgorithmConfig(aggregation=aggregation))
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    assert total == pytest.approx(1.0 if sum(counts) else 0.0)
