"""Which tokens are in the loss, by hand:

- `main` trains the conversation with the most turns, of equals the earlier; the others are masked and counted
- roots with an equal first message after the system's are one conversation, however it is written; so are completions
- a branch of a conversation belongs to it
- masked tokens are counted by reason; a trajectory is `altered` only if that is why nothing of it is trained
"""

from dataclasses import replace
from typing import Any

import pytest

from areal_agent.tokens.loss_rule import LossRule, Mask, TrainRoots
from areal_agent.tokens.records import token_records
from areal_agent.types import Distribution, Drop, FinishReason, Trajectory, Turn
from tests import histories

MAIN = LossRule(roots=TrainRoots.MAIN)
SOLVE: dict[str, Any] = {"role": "user", "content": "solve it"}
TITLE: dict[str, Any] = {"role": "user", "content": "a title, please"}


def turn(name: str, *messages: dict[str, Any], parent: str | None = None, **changes: Any) -> Turn:
    """A turn whose answer has three tokens and the id of the turn."""
    completion = replace(histories.completion(name, [0, 0, 0]), **changes)
    return histories.turn(name, completion, parent=parent, fork_at=4 if parent else 0, request_delta=messages)


def trajectory(*turns: Turn, **changes: Any) -> Trajectory:
    return replace(histories.trajectory("s", (), 1.0, turns=turns), **changes)


def beside(*turns: Turn) -> set[str]:
    """The answers outside the main conversation; the records agree."""
    one = trajectory(*turns)
    masks = MAIN.masks(one)
    trained = sum(int(record.loss_mask.sum()) for record in token_records(one, MAIN))
    assert trained == 3 * (len(turns) - len(masks))
    return {name for name, mask in masks.items() if mask is Mask.OTHER_ROOTS}


def test_the_conversation_with_the_most_turns_is_trained() -> None:
    turns = (turn("title", TITLE), turn("a", SOLVE), turn("b", {"role": "tool", "content": "4"}, parent="a"))
    assert beside(*turns) == {"title"}
    one = trajectory(*turns)
    assert MAIN.masked_tokens(one) == {Mask.OTHER_ROOTS: 3}
    assert LossRule().masks(one) == {}


def test_of_equals_the_earlier_is_trained() -> None:
    assert beside(turn("a", SOLVE), turn("title", TITLE)) == {"title"}


@pytest.mark.parametrize(
    "again",
    [
        [{"role": "system", "content": "be brief"}, SOLVE],
        [{"role": "developer", "content": "be brief"}, SOLVE],
        [{"role": "user", "content": [{"type": "text", "text": "solve"}, {"type": "text", "text": " it"}]}],
        [SOLVE, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}],
    ],
)
def test_roots_that_begin_alike_are_one_conversation(again: list[dict[str, Any]]) -> None:
    assert beside(turn("title", TITLE), turn("a", SOLVE), turn("b", *again)) == {"title"}


def test_a_branch_belongs_to_its_conversation() -> None:
    retried = [turn(name, TITLE, parent="title") for name in ("again", "and again")]
    assert beside(turn("a", SOLVE), turn("title", TITLE), *retried) == {"a"}


def test_completions_are_one_conversation() -> None:
    assert beside(turn("a", SOLVE), turn("x"), turn("y")) == {"a"}


def test_what_is_masked_is_counted_by_reason() -> None:
    one = trajectory(
        turn("a", SOLVE, finish_reason=FinishReason.ABORT),
        turn("b", SOLVE),
        turn("c", SOLVE, distribution=Distribution.ALTERED),
        turn("title", TITLE, distribution=Distribution.ALTERED),
        undelivered=("b",),
    )
    assert MAIN.masked_tokens(one) == {Mask.UNSEEN: 6, Mask.ALTERED: 3, Mask.OTHER_ROOTS: 3}


@pytest.mark.parametrize(
    ("turns", "drop"),
    [
        ([turn("a", SOLVE, distribution=Distribution.ALTERED)], Drop.ALTERED),
        ([turn("a", SOLVE, distribution=Distribution.ALTERED), turn("b", SOLVE)], Drop.FILTERED),
        ([turn("a", SOLVE, finish_reason=FinishReason.ABORT)], Drop.FILTERED),
        ([turn("a", SOLVE), turn("title", TITLE, distribution=Distribution.ALTERED)], Drop.FILTERED),
    ],
)
def test_why_a_trajectory_teaches_nothing(turns: list[Turn], drop: Drop) -> None:
    assert MAIN.drop_of(trajectory(*turns)) is drop
