"""Samples: what of a record the loss needs.

- A sample has the inputs before its last loss token and predicts each loss token one position earlier.
- A record that cannot be trained is refused: first token in the loss, no finite log-probability, no temperature.
- Emptied, it has one input and no loss token, and the same fields filled in.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_agent.algorithms.batching import sample_of

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


def test_an_emptied_sample_has_no_loss_token_and_the_same_fields(make_record):
    sample = replace(sample_of(make_record("s", "g", TWO_TURNS, [0.0, 1.0])), advantages=torch.ones(3), weight=0.5)
    emptied = sample.emptied()
    assert (emptied.num_tokens, emptied.num_loss_tokens, emptied.behavior.tolist()) == (1, 0, [])
    assert emptied.advantages is not None and emptied.advantages.tolist() == []
    assert (emptied.proximal, emptied.values) == (None, None)
