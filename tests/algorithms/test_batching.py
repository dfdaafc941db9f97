"""Micro-batches, packed and padded.

- Packed, sequences stand behind one another, and positions begin anew with each.
- Padded, each has a row, filled up on the right.
- Either way predicting positions point at the token before each target, and loss tokens are the same in the same order.
"""

import pytest
import torch

from areal_agent.algorithms.batching import Sample, collate, sample_of

CPU = torch.device("cpu")
TWO_TURNS = [[(False, [10, 11]), (True, [12, 13])], [(False, [14]), (True, [15]), (False, [16, 17])]]


@pytest.fixture
def samples(make_record) -> list[Sample]:
    long = make_record("s0", "g", TWO_TURNS, [0.0, 1.0])
    short = make_record("s1", "g", [[(False, [20, 21]), (True, [22])]], [1.0])
    return [sample_of(long), sample_of(short)]


def test_packed_positions_begin_anew_with_each_sequence(samples):
    batch = collate(samples, CPU)
    assert batch.inputs.tolist() == [[10, 11, 12, 13, 14, 20, 21]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.segments == (5, 2)


def test_padded_rows_are_filled_up_on_the_right(samples):
    batch = collate(samples, CPU, is_padded=True)
    assert batch.inputs.tolist() == [[10, 11, 12, 13, 14], [20, 21, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert batch.segments is None


@pytest.mark.parametrize("is_padded", [False, True])
def test_loss_tokens_are_the_same_either_way(samples, is_padded):
    batch = collate(samples, CPU, is_padded=is_padded)
    assert batch.inputs.flatten()[batch.predicting].tolist() == [11, 12, 14, 21]
    assert batch.targets.tolist() == [12, 13, 15, 22]
    assert batch.sequences.tolist() == [0, 0, 0, 1]
    assert batch.num_input_tokens == 7


def test_an_emptied_sample_counts_as_padding(samples):
    batch = collate([samples[0].emptied()], CPU)
    assert (batch.inputs.numel(), batch.num_input_tokens, batch.num_loss_tokens) == (1, 0, 0)
