"""The staleness bound at the door of a gateway: whether so many answers more may be started. Pure."""

from dataclasses import dataclass

from areal_agent.errors import RequestError
from areal_agent.staleness import room

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

    A batch counts as B answers however many it had, so that a trainer that takes fewer does not widen the bound.
    """

    published: int = 0
    leased: int = 0


def capacity(bound: Bound, progress: Progress, under_way: int) -> int:
    """How many answers may be admitted beside those that run or wait to be leased."""
    return room(
        step=progress.published,
        max_staleness=bound.max_staleness,
        batch_answers=bound.batch_answers,
        consumed=max(progress.leased, progress.published) * bound.batch_answers,
        under_way=under_way,
    )


def require_room(size: int, bound: Bound, progress: Progress, *, num_running: int, num_finished: int) -> None:
    """Raises RequestError unless `size` answers more may be started: 429 for now, 400 for ever."""
    most = (bound.max_staleness + 1) * bound.batch_answers
    if size > most:
        raise RequestError(
            f"group_size is {size}; the staleness bound never admits more than {most} answers at once "
            f"(max_staleness {bound.max_staleness}, {bound.batch_answers} answers a train step)",
            param="group_size",
            code="invalid_value",
        )
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
