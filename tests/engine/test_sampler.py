"""The sampler: uniform numbers are uniform and a pure function of seed and index; draws follow the probabilities;
nothing of probability zero is ever drawn; top-k and top-p keep the right tokens.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.embedded.sampler import SamplingRows, sample, uniform
from areal_agent.types import SamplingParams

CPU = torch.device("cpu")
LOGIT = st.one_of(st.integers(-240, 240).map(lambda i: i / 8), st.just(float("-inf")))  # distinct in float32, or equal


def draw(logits: list[float], params: SamplingParams, num_draws: int, seed: int = 0) -> list[int]:
    """`num_draws` tokens of one distribution: rows of one batch, with token indices 0, 1, ..."""
    rows = SamplingRows.of([params] * num_draws, [seed] * num_draws, vocab_size=len(logits), device=CPU)
    return sample(torch.tensor([logits] * num_draws), rows, range(num_draws)).token_ids


def test_uniform_numbers_fill_the_interval_evenly():
    numbers = uniform(np.full(100_000, 7, dtype=np.uint64), np.arange(100_000, dtype=np.uint64))
    counts = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
    assert np.square(counts - 5000).sum() / 5000 < 50  # chi-square, 19 degrees of freedom: p = 1e-4
    assert numbers.min() >= 0.0 and numbers.max() < 1.0


def test_neighbouring_seeds_and_indices_are_uncorrelated():
    seeds, indices = np.arange(10_000, dtype=np.uint64), np.zeros(10_000, dtype=np.uint64)
    same_index = uniform(seeds, indices)
    shifted = uniform(seeds, indices + np.uint64(1))
    assert abs(np.corrcoef(same_index, shifted)[0, 1]) < 0.05
    assert abs(np.corrcoef(same_index[1:], shifted[:-1])[0, 1]) < 0.05


def test_draws_follow_the_probabilities():
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    tokens = draw(np.log(probabilities).tolist(), SamplingParams(), 20_000)
    counts = np.bincount(tokens, minlength=4)
    assert np.square(counts - 20_000 * probabilities).__truediv__(20_000 * probabilities).sum() < 21  # 3 dof: p = 1e-4


@given(
    logits=st.lists(LOGIT, min_size=1, max_size=40).filter(lambda row: max(row) > float("-inf")),
    seed=st.integers(0, 2**63 - 1),
    top_p=st.floats(0.01, 1.0),
    top_k=st.one_of(st.just(-1), st.integers(1, 50)),
)
def test_only_tokens_that_may_be_drawn_are_drawn(logits, seed, top_p, top_k):
    tokens = draw(logits, SamplingParams(top_p=top_p, top_k=top_k), 16, seed)
    assert all(logits[token] > float("-inf") for token in tokens)
    if top_k > 0:
        assert all(sum(other > logits[token] for other in logits) < top_k for token in tokens)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert set(draw(logits, SamplingParams(top_p=0.6), 2000)) == {0, 1}
    assert set(draw(logits, SamplingParams(top_p=0.8), 2000)) == {0, 1, 2}


def test_rows_with_different_parameters_do_not_mix():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).expand(3, 4)
    params = [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams()]
    rows = SamplingRows.of(params, [1, 2, 3], vocab_size=4, device=CPU)
    drawn = [sample(logits, rows, [index] * 3).token_ids for index in range(200)]
    assert {row[0] for row in drawn} == {0}
    assert {row[1] for row in drawn} == {0}
    assert {row[2] for row in drawn} == {0, 1, 2, 3}


def test_a_top_p_that_is_nothing_in_float32_keeps_the_most_probable():
    assert set(draw([0.0, 3.0, 1.0], SamplingParams(top_p=1e-60), 50)) == {1}
