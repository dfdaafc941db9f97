"""A trajectory as token records, by hand:

- two turns: ids, mask, turn index, log-probabilities, temperatures, versions, and rewards at their turns
- a fork: the newest branch trains what is shared, the other names it as its parent; rewards count once
- a turn that keeps a part of its parent's tokens continues exactly that part
- altered, aborted and undelivered completions are masked
- altered ones are trained on request, except greedy ones
- tokens that a later turn injects into its prompt are in the loss where they were sampled, and not there
- several answers of one turn are branches of their own
- a branch says where it left its parent, and whether its own call is a parallel sample of another's
- a turn is truncated in the branch that has the whole answer, if that ended by its length
- images stand where their prompts do, in every branch that keeps them; a fork never cuts through one
- a turn without its parent, or one that forks beyond the parent's end, is an error
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_agent.errors import LedgerError
from areal_agent.tokens.loss_rule import LossRule
from areal_agent.tokens.records import token_records
from areal_agent.types import (
    Completion,
    Distribution,
    FinishReason,
    ImageSpan,
    Rewards,
    SamplingParams,
    Trajectory,
    Turn,
    VersionSpan,
    WeightVersion,
)
from tests import histories


def completion(completion_id: str, *token_ids: int, step: int = 0, **changes: Any) -> Completion:
    logprobs = tuple(-token_id / 8 for token_id in token_ids)
    made = histories.completion(completion_id, [step] * len(token_ids), token_ids=token_ids, logprobs=logprobs)
    return replace(made, **changes)


def turn(prompt: tuple[int, ...], *completions: Completion, **changes: Any) -> Turn:
    sampling = SamplingParams(temperature=0.5)
    return histories.turn(
        f"turn-{completions[0].id}", *completions, new_prompt_ids=prompt, sampling=sampling, **changes
    )


def trajectory(*turns: Turn, final: float | None = 1.0, **by_completion: float) -> Trajectory:
    rewards = Rewards(final=final, by_completion=by_completion)
    return histories.trajectory("s", (), 0.0, turns=turns, rewards=rewards)


def test_answers_that_ended_by_their_length_are_told() -> None:
    cut = completion("c2", 6, 7, finish_reason=FinishReason.LENGTH)
    first, second = token_records(
        trajectory(
            turn((1, 2), completion("c1", 3, 4)),
            turn((5,), cut, parent="c1", fork_at=4),
            turn((8,), completion("c3", 9), parent="c2", fork_at=6),  # keeps one of the two tokens of c2
        )
    )
    assert first.truncated.tolist() == [False, False, False]
    assert second.truncated.tolist() == [False, True]


def test_images_stand_where_their_prompts_do() -> None:
    a, b = (ImageSpan(digest=name, start=1, end=3) for name in "ab")
    first = turn((1, 9, 9), completion("c1", 3, 9), images=(a,))
    second = turn((5, 9, 9), completion("c2", 6), parent="c1", fork_at=5, images=(b,))
    fork = turn((8,), completion("c3", 4), parent="c2", fork_at=5)  # before the second image
    again = turn((8,), completion("c4", 4), parent="c2", fork_at=5, images=(replace(b, start=0, end=1),))
    records = token_records(trajectory(first, second, fork, again))
    seen = [[(one.digest, one.start, one.end) for one in record.images] for record in records]
    assert seen == [[("a", 1, 3), ("b", 5, 6)], [("a", 1, 3)], [("a", 1, 3), ("b", 6, 8)]]
    assert records[1].sample_of is None  # the ids of its call are those of the one before, its images are not
    with pytest.raises(LedgerError, match="image b of turn turn-c2 is cut by a later turn"):
        token_records(trajectory(first, second, turn((8,), completion("c3", 4), parent="c2", fork_at=7)))


def test_two_turns_by_hand() -> None:
    (record,) = token_records(
        trajectory(
            turn((1, 2), completion("c1", 3, 4, step=6)),
            turn((5,), completion("c2", 6, step=7), parent="c1", fork_at=4),
            c1=0.25,
        )
    )
    assert (record.session_id, record.group_id, record.branch, record.parent_branch) == ("s", "g", 0, None)
    assert record.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert record.loss_mask.tolist() == [False, False, True, True, False, True]
    assert record.turn_index.tolist() == [0, 0, 0, 0, 1, 1]
    assert record.behavior_logprobs.tolist() == [0, 0, -3 / 8, -4 / 8, 0, -6 / 8]
    assert record.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 0.5]
    assert record.versions.tolist() == [-1, -1, 6, 6, -1, 7]
    assert record.turn_rewards.tolist() == [0.25, 1.0]
    assert record.token_ids.dtype == record.versions.dtype == np.int32
    assert record.behavior_logprobs.dtype == record.turn_rewards.dtype == np.float32


def test_a_completion_of_two_incarnations() -> None:
    old, new = (WeightVersion(incarnation=incarnation, step=5) for incarnation in (0, 1))
    spans = (VersionSpan(version=old, start=0, end=1), VersionSpan(version=new, start=1, end=3))
    (record,) = token_records(trajectory(turn((1,), completion("c1", 3, 4, 5, versions=spans))))
    assert record.versions.tolist() == [-1, 5, 5, 5]
    assert record.incarnations.tolist() == [-1, 0, 1, 1]


def test_a_fork_trains_shared_tokens_in_the_newest_branch() -> None:
    first, second = token_records(
        trajectory(
            turn((1,), completion("c1", 2)),
            turn((3,), completion("c2", 4), parent="c1", fork_at=2),
            turn((5,), completion("c3", 6), parent="c1", fork_at=2),
            c1=0.5,
            c2=0.25,
        )
    )
    assert first.token_ids.tolist() == [1, 2, 5, 6]
    assert first.loss_mask.tolist() == [False, True, False, True]
    assert first.turn_rewards.tolist() == [0.5, 1.0]
    assert (first.branch, first.parent_branch) == (0, None)
    assert second.token_ids.tolist() == [1, 2, 3, 4]
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert second.turn_rewards.tolist() == [0.0, 1.25]
    assert (second.branch, second.parent_branch) == (1, 0)


def test_a_turn_may_keep_a_part_of_its_parent() -> None:
    newest, oldest = token_records(
        trajectory(turn((1, 2), completion("c1", 3, 4)), turn((9,), completion("c2", 8), parent="c1", fork_at=3))
    )
    assert newest.token_ids.tolist() == [1, 2, 3, 9, 8]
    assert newest.loss_mask.tolist() == [False, False, True, False, True]
    assert oldest.token_ids.tolist() == [1, 2, 3, 4]
    assert oldest.loss_mask.tolist() == [False, False, False, True]
    assert oldest.parent_branch == 0


@pytest.mark.parametrize(
    "change", [{"distribution": Distribution.ALTERED}, {"finish_reason": FinishReason.ABORT}], ids=str
)
def test_altered_and_aborted_completions_are_masked(change: dict[str, Any]) -> None:
    (record,) = token_records(
        trajectory(turn((1,), completion("c1", 2, **change)), turn((3,), completion("c2", 4), parent="c1", fork_at=2))
    )
    assert record.loss_mask.tolist() == [False, False, False, True]
    assert record.behavior_logprobs.tolist() == [0, 0, 0, -0.5]
    assert record.temperatures.tolist() == [1, 1, 1, 0.5]


@pytest.mark.parametrize(("temperature", "is_trained"), [(0.5, True), (0.0, False)])
def test_altered_completions_are_trained_where_asked_for(temperature: float, is_trained: bool) -> None:
    sampled = turn((1,), completion("c1", 2, distribution=Distribution.ALTERED))
    sampled = replace(sampled, sampling=SamplingParams(temperature=temperature, top_p=0.9))
    (record,) = token_records(trajectory(sampled), LossRule(trains_altered=True))
    assert record.loss_mask.tolist() == [False, is_trained]


def test_an_undelivered_completion_is_masked() -> None:
    one = trajectory(turn((1,), completion("c1", 2)), turn((3,), completion("c2", 4), parent="c1", fork_at=2))
    (record,) = token_records(replace(one, undelivered=("c2",)))
    assert record.loss_mask.tolist() == [False, True, False, False]


def test_injected_tokens_are_in_the_loss_of_their_own_branch_only() -> None:
    newest, oldest = token_records(
        trajectory(
            turn((1, 2), completion("c1", 3, 4, 5)),  # 3 is the thinking, which the template strips
            turn((4, 5, 6), completion("c2", 7), parent="c1", fork_at=2),
        )
    )
    assert newest.token_ids.tolist() == [1, 2, 4, 5, 6, 7]
    assert newest.loss_mask.tolist() == [False] * 5 + [True]
    assert oldest.loss_mask.tolist() == [False, False, True, True, True]


def test_several_answers_of_a_turn_are_branches() -> None:
    records = token_records(trajectory(turn((1,), completion("c1-0", 2), completion("c1-1", 3))))
    assert [record.token_ids.tolist() for record in records] == [[1, 3], [1, 2]]
    assert [record.loss_mask.tolist() for record in records] == [[False, True]] * 2
    assert [record.parent_branch for record in records] == [None, None]


def test_no_final_reward_adds_nothing() -> None:
    (record,) = token_records(trajectory(turn((1,), completion("c1", 2)), final=None, c1=2.0))
    assert record.turn_rewards.tolist() == [2.0]


def test_no_turns_are_no_records() -> None:
    assert token_records(trajectory()) == ()


@pytest.mark.parametrize(("parent", "fork_at"), [("c9", 1), ("c1", 3)])
def test_a_contradiction_is_an_error(parent: str, fork_at: int) -> None:
    with pytest.raises(LedgerError, match=r"continues|past the end"):
        token_records(
            trajectory(turn((1,), completion("c1", 2)), turn((3,), completion("c2", 4), parent=parent, fork_at=fork_at))
        )


def test_a_branch_says_where_it_left_its_parent() -> None:
    trunk = turn((1,), completion("a", 2))
    sub_agent = turn((5,), completion("sub", 6), parent="a", fork_at=2)
    answer = turn((3,), completion("b", 4), parent="a", fork_at=2)
    newest, older = token_records(trajectory(trunk, sub_agent, answer, final=0.5, a=1.0))
    assert (newest.parent_branch, newest.fork_turn, newest.own_turn, newest.sample_of) == (None, None, 0, None)
    assert (older.parent_branch, older.fork_turn, older.own_turn, older.sample_of) == (0, 0, 1, None)
    assert (newest.final_reward, older.final_reward) == (0.5, 0.5)


def test_answers_of_one_turn_and_of_one_request_asked_twice_are_parallel_samples() -> None:
    trunk = turn((1,), completion("a", 2))
    twice = turn((3,), completion("b", 4), completion("c", 5), parent="a", fork_at=2)
    again = turn((3,), completion("d", 6), parent="a", fork_at=2)
    records = token_records(trajectory(trunk, twice, again))
    assert [(one.fork_turn, one.own_turn, one.sample_of) for one in records] == [(None, 0, None), (0, 1, 0), (0, 1, 0)]


def test_the_rest_of_an_answer_is_no_parallel_sample() -> None:
    trunk = turn((1,), completion("a", 2, 3, 4))
    cut = turn((7,), completion("b", 8), parent="a", fork_at=2)
    _, rest = token_records(trajectory(trunk, cut))
    assert (rest.parent_branch, rest.fork_turn, rest.own_turn, rest.sample_of) == (0, 0, 0, None)
