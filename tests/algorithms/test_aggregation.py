"""What a token counts, by hand: in a rollout of two branches with 1 and 3 tokens, one with 4, and one without any.

1. token_mean: all alike; 2. sequence_mean: every rollout alike, however often it forked; 3. constant: by a fixed
length; 4. whatever the branches, the weights of token_mean and sequence_mean add up to 1.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.packing import token_weights

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


def test_every_rollout_counts_alike_in_the_sequence_mean():
    config = AlgorithmConfig(aggregation="sequence_mean")
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
