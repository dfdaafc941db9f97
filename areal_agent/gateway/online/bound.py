"""The staleness bound at the door of a gateway: whether so many answers more may be started. Pure."""

from dataclasses import dataclass, replace
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.staleness import room
from areal_agent.types import JsonObject

RETRY_AFTER_S = 1
"""When whoever was refused at the bound should ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The staleness bound: B answers (rollouts) a train step, eta versions."""

    batch_answers: int
    max_staleness: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the trainer is: version `published` serves, and batches up to `leased` have been handed out.

    A batch counts as B answers at least, so that a trainer that takes fewer does not widen the bound. What one had
    beyond B counts until its step is published: until then it would let more in beside the version that serves. Counted
    for ever it would use the bound up, and nothing would be let in any more.
    """

    published: int = 0
    leased: int = 0
    surplus: tuple[tuple[int, int], ...] = ()  # (step, answers beyond B) of steps not yet published

    @classmethod
    def read(cls, fields: JsonObject) -> Self:
        """The inverse of what JSON makes of it."""
        surplus = tuple((step, answers) for step, answers in fields.get("surplus", ()))
        return cls(published=fields["published"], leased=fields["leased"], surplus=surplus)

    def to_version(self, step: int) -> Self:
        """Version `step` serves."""
        surplus = tuple(one for one in self.surplus if one[0] > step)
        return replace(self, published=step, leased=max(step, self.leased), surplus=surplus)

    def to_batch(self, step: int, num_answers: int, bound: Bound | None) -> Self:
        """A batch of so many answers is handed out for `step`."""
        beyond = 0 if bound is None else num_answers - bound.batch_answers
        surplus = (*self.surplus, (step, beyond)) if beyond > 0 else self.surplus
        return replace(self, leased=step, surplus=surplus)

    def consumed(self, bound: Bound) -> int:
        """Answers that the trainer has had."""
        return max(self.leased, self.published) * bound.batch_answers + sum(answers for _, answers in self.surplus)


def capacity(bound: Bound, progress: Progress, under_way: int) -> int:
    """How many answers may be admitted beside those that run or wait to be leased."""
    return room(
        step=progress.published,
        max_staleness=bound.max_staleness,
        batch_answers=bound.batch_answers,
        consumed=progress.consumed(bound),
        under_way=under_way,
    )


def require_possible(size: int, bound: Bound) -> None:
    """Raises RequestError (400) for a group that never fits."""
    most = (bound.max_staleness + 1) * bound.batch_answers
    if size > most:
        raise RequestError(
            f"group_size is {size}; the staleness bound never admits more than {most} answers at once "
            f"(max_staleness {bound.max_staleness}, {bound.batch_answers} answers a train step)",
            param="group_size",
            code="invalid_value",
        )


def require_room(size: int, bound: Bound, progress: Progress, *, num_running: int, num_finished: int) -> None:
    """Raises RequestError (429) unless `size` answers more may be started now."""
    left = capacity(bound, progress, num_running + num_finished)
    if left < size:
        raise RequestError(
            f"the staleness bound is reached: {num_running} answers run and {num_finished} wait to be trained, which "
            f"leaves room for {max(0, left)} of the {size} asked for at weight version {progress.published}; ask again "
            f"when the trainer has published version {progress.published + 1}",
            status=429,
            code="staleness_bound",
            retry_after_s=RETRY_AFTER_S,
        )
