"""Credit along the tree of a rollout's branches, by hand.

- Named parts are added to the final reward with their weights; one that is missing, or has no weight, adds nothing.
- `length` counts sampled tokens; `overlong` falls where an answer nears its limit. Own parts of these names stay.
- A turn above a fork earns the sum over sub-agents, the mean over parallel samples, discounted by causal distance.
- The final reward is not multiplied by branches. The rest of an answer that a branch left is earned by its beginning.
- Rollouts without forks, and forks without rewards of completions, come back as they are.
- The order of records does not matter.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.advantages import returns_by_token
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.credit import reward_parts, with_causal_credit, with_parts
from areal_agent.types import Rewards, SamplingParams, TokenRecord
from tests import histories

TURN = [(False, [1]), (True, [2])]


@pytest.fixture
def make_branch(make_record):
    """A branch of session s with one action a turn; `rewards` are those of completions, by turn."""

    def make(branch: int, rewards: list[float], *, final: float = 0.0, **fork: int | None) -> TokenRecord:
        paid = [*rewards[:-1], rewards[-1] + final]
        record = make_record("s", "g", [TURN] * len(rewards), paid, branch=branch)
        return replace(record, **({"parent_branch": None, "final_reward": final} | fork))

    return make


def returns(record: TokenRecord, discount: float) -> list[float]:
    """Of each turn, by summing along the branch alone."""
    return returns_by_token(record.turn_rewards.tolist(), [discount] * len(record.turn_rewards)).tolist()


def test_parts_are_added_with_their_weights(make_branch, make_record):
    other = make_record("other", "g", [TURN], [0.0])
    parts = {"s": {"style": 2.0, "speed": 9.0}}
    records, rewards = with_parts(
        [make_branch(0, [0.5, 0.0], final=1.0), other], {"s": 1.5, "other": 0.0}, parts, {"style": 0.25, "depth": 1.0}
    )
    assert records[0].turn_rewards.tolist() == [0.5, 1.5]
    assert records[0].final_reward == 1.5
    assert records[1].turn_rewards.tolist() == [0.0]
    assert rewards == {"s": 2.0, "other": 0.0}


@pytest.mark.parametrize(
    ("lengths", "overlong"),
    [
        ([40, 80], 0.0),
        ([90, 10], -0.5),  # of 100 tokens, the last fifth: (80 - 90) / 20
        ([90, 100], -1.0),
    ],
)
def test_computed_parts_by_hand(lengths, overlong):
    turns = [
        histories.turn(f"t{n}", histories.completion(f"c{n}", [1] * n), sampling=SamplingParams(max_tokens=100))
        for n in [*lengths, 99]
    ]
    rollout = histories.trajectory(
        "s", (), 0.0, turns=tuple(turns), undelivered=("c99",), rewards=Rewards(parts={"a": 2.0})
    )
    assert reward_parts(rollout, AlgorithmConfig()) == {"a": 2.0}
    weighted = AlgorithmConfig(reward_parts={"length": -1.0, "overlong": 1.0})
    expected = {"length": sum(lengths) / 1000, "overlong": overlong, "a": 2.0}
    assert reward_parts(rollout, weighted) == pytest.approx(expected)


def test_a_part_that_a_workflow_names_itself_is_not_computed():
    rollout = histories.trajectory("s", [1], 0.0, rewards=Rewards(final=0.0, parts={"length": 7.0}))
    assert reward_parts(rollout, AlgorithmConfig(reward_parts={"length": 1.0})) == {"length": 7.0}


def test_a_call_above_sub_agents_earns_the_sum(make_branch):
    trunk = make_branch(0, [0.0, 0.0, 1.0])
    first = make_branch(1, [0.0, 0.0, 2.0], parent_branch=0, fork_turn=0, own_turn=1)
    second = make_branch(2, [0.0, 4.0], parent_branch=0, fork_turn=0, own_turn=1)
    credited = with_causal_credit([trunk, first, second], 0.5)
    # own continuation 0.25 * 1, sub-agents 0.25 * 2 and 0.5 * 4
    assert returns(credited[0], 0.5) == [0.25 + 0.5 + 2.0, 0.5, 1.0]
    assert returns(credited[1], 0.5)[1:] == [1.0, 2.0]
    assert returns(credited[2], 0.5)[1:] == [4.0]


def test_a_call_above_parallel_samples_earns_the_mean(make_branch):
    trunk = make_branch(0, [0.0, 3.0])
    samples = [
        make_branch(number, [0.0, reward], parent_branch=0, fork_turn=0, own_turn=1, sample_of=0)
        for number, reward in ((1, 0.0), (2, 6.0))
    ]
    credited = with_causal_credit([trunk, *samples], 0.5)
    assert returns(credited[0], 0.5) == [0.5 * 3.0, 3.0]
    assert [returns(one, 0.5)[1] for one in credited] == [3.0, 0.0, 6.0]


def test_samples_of_a_sub_agents_call_are_averaged_among_themselves(make_branch):
    trunk = make_branch(0, [0.0, 1.0])
    sub_agent = make_branch(1, [0.0, 2.0], parent_branch=0, fork_turn=0, own_turn=1)
    its_sample = make_branch(2, [0.0, 4.0], parent_branch=0, fork_turn=0, own_turn=1, sample_of=1)
    credited = with_causal_credit([trunk, sub_agent, its_sample], 1.0)
    assert returns(credited[0], 1.0)[0] == 1.0 + 3.0


def test_the_final_reward_is_not_multiplied_by_branches(make_branch):
    trunk = make_branch(0, [0.0, 0.0, 0.5], final=1.0)
    fork = make_branch(1, [0.0, 0.0], final=1.0, parent_branch=0, fork_turn=0, own_turn=1)
    credited = with_causal_credit([trunk, fork], 1.0)
    assert returns(credited[0], 1.0) == [1.5, 1.5, 1.5]
    assert returns(credited[1], 1.0)[1:] == [1.0]


def test_the_beginning_of_an_answer_earns_what_its_rest_earned(make_branch):
    trunk = make_branch(0, [0.0, 1.0])  # it left the answer of turn 0 in its middle
    rest = make_branch(1, [2.0], parent_branch=0, fork_turn=0, own_turn=0)
    credited = with_causal_credit([trunk, rest], 0.5)
    assert returns(credited[0], 0.5) == [0.5 + 2.0, 1.0]


def test_what_needs_no_credit_comes_back_as_it_is(make_branch, make_record):
    alone = make_record("t", "g", [TURN, TURN], [0.1, 0.7])
    trunk = make_branch(0, [0.0, 0.0], final=0.1)
    fork = make_branch(1, [0.0, 0.0], final=0.1, parent_branch=0, fork_turn=0, own_turn=1)
    records = [
        alone,
        replace(trunk, final_reward=float(np.float32(0.1))),
        replace(fork, final_reward=float(np.float32(0.1))),
    ]
    assert all(one is other for one, other in zip(with_causal_credit(records, 0.9), records, strict=True))


reward = st.integers(-4, 4).map(float)


@given(rewards=st.lists(reward, min_size=4, max_size=4), order=st.permutations(range(3)))
def test_the_order_of_records_does_not_matter(make_record, rewards, order):
    def branch(number: int, own: float, parent: int | None, fork_turn: int | None) -> TokenRecord:
        record = make_record("s", "g", [TURN] * (number + 1), [0.0] * number + [own], branch=number)
        return replace(record, parent_branch=parent, fork_turn=fork_turn, own_turn=number)

    records = [branch(0, rewards[0], None, None), branch(1, rewards[1], 0, 0), branch(2, rewards[2], 1, 1)]
    straight = {one.branch: one.turn_rewards.tolist() for one in with_causal_credit(records, 0.5)}
    shuffled = {one.branch: one.turn_rewards.tolist() for one in with_causal_credit([records[i] for i in order], 0.5)}
    assert straight == shuffled
    assert straight[0] == [rewards[0] + 0.5 * rewards[1] + 0.25 * rewards[2]]
