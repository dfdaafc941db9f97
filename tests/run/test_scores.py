"""The figures of an evaluation, by numbers worked out by hand.

1. pass@1 is the mean over tasks of the mean over their samples, with an interval clustered by task that has a width at
0 and 1; 2. pass@k is unbiased; 3. the majority decides by logged answers, and says nothing without them; 4. failures
are counted and in no figure; 5. two evaluations are compared task by task.
"""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.run.scores import Comparison, Estimate, Sample, Scores, pass_at_k, success_by_task, tags_of
from areal_agent.types import Task


def sample(task: str, reward: float | None, **values: Any) -> Sample:
    fields: dict[str, Any] = {
        "session_id": "s",
        "task_id": task,
        "status": "infra" if reward is None else "completed",
        "reward": reward,
        "answer": None,
        "num_tokens": 10,
        "num_turns": 2,
        "seconds": 1.5,
        "is_truncated": False,
        **values,
    }
    return Sample(**fields)


def test_every_task_weighs_the_same() -> None:
    scores = Scores.of([sample("a", 1.0), *[sample("b", reward) for reward in (0.0, 0.0, 0.0, 1.0)]], 1.0)
    assert scores is not None
    assert (scores.num_tasks, scores.num_samples) == (2, 5)
    assert scores.pass_at_1.mean == (1.0 + 0.25) / 2
    assert scores.reward_mean == (1.0 + 0.25) / 2
    assert (scores.tokens, scores.turns, scores.seconds, scores.truncated) == (10, 2, 1.5, 0)


def test_the_interval_is_wilsons_with_the_samples_that_tasks_are_worth() -> None:
    shares = [1.0] * 6 + [0.0] * 4  # as 9 independent samples: p (1 - p) / SE^2 = 0.24 / (0.24 / 9)
    found = Estimate.of_share(shares)
    number, z = 9.0, 1.96
    middle = (0.6 + z**2 / (2 * number)) / (1 + z**2 / number)
    half = z / (1 + z**2 / number) * math.sqrt(0.24 / number + z**2 / (4 * number**2))
    assert (found.low, found.high) == (pytest.approx(middle - half), pytest.approx(middle + half))
    certain = Estimate.of_share([1.0] * 20)
    assert (certain.mean, certain.high) == (1.0, pytest.approx(1.0))
    assert 0.8 < certain.low < 0.9


@pytest.mark.parametrize("shares", [[0.5, 0.75], [0.5, 0.5, 0.51], [0.5, 0.5], [0.49, 0.51] * 5])
def test_tasks_that_happen_to_be_alike_prove_no_more_than_their_samples(shares: list[float]) -> None:
    num_samples = 4 * len(shares)
    found, independent = Estimate.of_share(shares, num_samples), sum(shares) / len(shares)
    half = 1.96 * math.sqrt(independent * (1 - independent) / (num_samples + 1.96**2))
    assert found.high - found.low > 1.9 * half


def test_few_tasks_that_changed_alike_are_no_certainty() -> None:
    for differences, is_positive in (([1.0], False), ([1.0] * 3, False), ([1.0] * 20, True), ([0.0] * 5, False)):
        found = Estimate.of_difference(differences)
        assert -1.0 <= found.low < found.mean <= found.high <= 1.0 or found.mean == 0.0 < found.high == -found.low
        assert (found.low > 0.0) is is_positive


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_mean_and_is_a_share(shares: list[float]) -> None:
    found = Estimate.of_share(shares)
    assert 0.0 <= found.low <= found.mean + 1e-9
    assert found.mean - 1e-9 <= found.high <= 1.0


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    assert pass_at_k(5, 2, 3) == pytest.approx(1 - 1 / 10)  # of ten draws of three, one has none of the two
    scores = Scores.of([sample("a", reward) for reward in (1.0, 0.0, 0.0, 0.0, 1.0)] + [sample("b", 0.0)], 1.0)
    assert scores is not None
    assert scores.pass_at == {2: pytest.approx(0.7), 4: pytest.approx(1.0), 5: 1.0}  # "b" has too few samples


def test_the_majority_decides_by_logged_answers() -> None:
    votes = [sample("a", 0.0, answer="3"), sample("a", 1.0, answer="4"), sample("a", 1.0, answer="4")]
    votes += [sample("b", 0.0, answer="1"), sample("b", 1.0, answer="2")]  # a tie goes to the first
    scores = Scores.of(votes, 1.0)
    assert scores is not None and scores.majority == 0.5
    undecided = [sample("c", 1.0, answer="2"), sample("c", 0.0), sample("c", 0.0)]  # two gave no answer
    scores = Scores.of([*votes, *undecided], 1.0)
    assert scores is not None and scores.majority == pytest.approx(1 / 3)
    unlogged = Scores.of([sample("b", 1.0), sample("b", 1.0)], 1.0)
    assert unlogged is not None and unlogged.majority is None


def test_failures_are_in_no_figure() -> None:
    scores = Scores.of([sample("a", 1.0), sample("a", None), sample("b", None, status="timeout")], 1.0)
    assert scores is not None
    assert (scores.pass_at_1.mean, scores.num_tasks) == (1.0, 1)
    assert scores.failures == {"infra": 1, "timeout": 1}
    assert scores.lines()[-1] == "failed      2 rollouts, which are in no figure: 1 infra, 1 timeout"
    assert Scores.of([sample("a", None)], 1.0) is None


def test_two_evaluations_are_compared_task_by_task() -> None:
    before = success_by_task([sample("a", 0.0), sample("b", 1.0), sample("b", 0.0), sample("only", 1.0)], 1.0)
    comparison = Comparison.of(before, {"a": 1.0, "b": 0.5, "other": 1.0})
    assert comparison is not None
    assert (comparison.num_tasks, comparison.difference.mean, comparison.changed) == (2, 0.5, [("a", 0.0, 1.0)])
    assert comparison.difference.high == 1.0 and comparison.difference.low < 0.0
    assert Comparison.of(before, {"other": 1.0}) is None


def test_tags_are_of_the_data_or_the_metadata() -> None:
    tasks = Task(id="a", data={"tags": ["x", 2]}), Task(id="b", data={}, metadata={"tags": "y"}), Task(id="c", data={})
    assert [tags_of(task) for task in tasks] == [("x", "2"), ("y",), ()]
    assert [tags_of(Task(id="d", data={"tags": given})) for given in (None, 5)] == [(), ("5",)]
