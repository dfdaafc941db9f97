"""Samples, their micro-batches, and padding.

- A sample has the inputs before its last loss token and predicts each loss token one position earlier.
- A record that cannot be trained is refused: first token in the loss, no finite log-probability, no temperature.
- The schedule is Algorithm 1 of the paper: every sequence once, within the budget padding included, oversized alone,
  the same micro-batches in whatever order the sequences come.
- Collating pads on the right and points at the right places.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.batching import collate, sample_of, schedule

CPU = torch.device("cpu")
TWO_TURNS = [[(False, [10, 11]), (True, [12, 13])], [(False, [14]), (True, [15]), (False, [16, 17])]]


def test_a_sample_by_hand(make_record):
    record = make_record("s", "g", TWO_TURNS, [0.0, 1.0], temperature=0.7, logprob=-0.5, version=4)
    sample = sample_of(record)
    assert sample.inputs.tolist() == [10, 11, 12, 13, 14]
    assert sample.predicting.tolist() == [1, 2, 4]
    assert sample.targets.tolist() == [12, 13, 15]
    assert sample.temperatures.tolist() == pytest.approx([0.7] * 3)
    assert sample.behavior.tolist() == [-0.5] * 3
    assert sample.versions.tolist() == [4] * 3


def test_a_record_without_loss_tokens_is_an_empty_sample(make_record):
    sample = sample_of(make_record("s", "g", [[(False, [1, 2, 3])]], [1.0]))
    assert (sample.num_tokens, sample.num_loss_tokens) == (0, 0)


def test_a_first_token_in_the_loss_is_refused(make_record):
    with pytest.raises(ValueError, match="branch 0 of session 's': its first token is in the loss"):
        sample_of(make_record("s", "g", [[(True, [1, 2])]], [1.0]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("behavior_logprobs", np.nan, "no finite behaviour log-probability"),
        ("behavior_logprobs", -np.inf, "no finite behaviour log-probability"),
        ("temperatures", 0.0, "temperature 0.0"),
    ],
)
def test_an_unusable_loss_token_is_refused(make_record, field, value, message):
    record = make_record("s", "g", [[(False, [1]), (True, [2])]], [1.0])
    broken = replace(record, **{field: np.array([1.0, value], dtype=np.float32)})
    with pytest.raises(ValueError, match=message):
        sample_of(broken)


def test_the_schedule_fills_the_fitting_micro_batch_with_the_fewest_sequences():
    # by length: 8, 7, 5, 4, 3, 2; budget 16; two are opened first, then 5 joins [8] (16 tokens), 4 joins [7] (14)
    assert schedule([5, 8, 2, 7, 3, 4], 16, at_least=2) == [[1, 0], [3, 5], [4, 2]]


def test_sequences_of_like_length_go_together():
    assert schedule([100, 50, 98, 49], 1000, max_padding=0.1) == [[0, 2], [1, 3]]


lengths = st.lists(st.integers(1, 300), max_size=60)


@given(lengths=lengths, budget=st.integers(1, 1000), at_least=st.integers(1, 8), padding=st.sampled_from([0.05, 1.0]))
def test_every_sequence_is_scheduled_once_within_the_budget_or_alone(lengths, budget, at_least, padding):
    micro_batches = schedule(lengths, budget, at_least=at_least, max_padding=padding)
    assert sorted(index for one in micro_batches for index in one) == list(range(len(lengths)))
    assert len(micro_batches) >= min(at_least, len(lengths))
    for one in micro_batches:
        assert len(one) == 1 or len(one) * max(lengths[index] for index in one) <= budget


@given(lengths=lengths, budget=st.integers(1, 1000), data=st.data())
def test_the_schedule_does_not_depend_on_the_order_of_sequences(lengths, budget, data):
    order = data.draw(st.permutations(range(len(lengths))))

    def as_lengths(sequences: list[int]) -> list[list[int]]:
        return [[sequences[index] for index in one] for one in schedule(sequences, budget)]

    assert as_lengths(lengths) == as_lengths([lengths[index] for index in order])


def test_collating_pads_on_the_right(make_record):
    long = sample_of(make_record("s0", "g", TWO_TURNS, [0.0, 1.0]))
    short = sample_of(make_record("s1", "g", [[(False, [20, 21]), (True, [22])]], [1.0]))
    batch = collate([long, short], CPU)
    assert batch.inputs.tolist() == [[10, 11, 12, 13, 14], [20, 21, 0, 0, 0]]
    assert batch.inputs.flatten()[batch.predicting].tolist() == [11, 12, 14, 21]
    assert batch.targets.tolist() == [12, 13, 15, 22]
    assert batch.num_input_tokens == 7
