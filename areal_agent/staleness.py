"""The staleness bound: how many rollouts may be under way, and what is too old to train. Pure functions and counters.

AReaL, Eq. 3: floor((N_r - 1) / B) <= i + eta, with N_r rollouts ever admitted (minus those whose capacity was given
back), B answers per train step, i the published weight version and eta the maximum staleness. Solved for what may be
under way:

    running + finished  <=  (eta + i + 1) * B  -  consumed

A batch for train step s is trained on top of version s - 1: the staleness of a trajectory in it is s - 1 minus the
version of its oldest sampled token.
"""

from dataclasses import dataclass, replace

from areal_agent.types import TokenRecord, Trajectory


def oldest_step(trajectory: Trajectory) -> int:
    """Return the step of the oldest weights that sampled a token of it. Raises ValueError when nothing was sampled."""
    return min(trajectory.sampled_steps())


def is_stale(oldest: int, step: int, max_staleness: int) -> bool:
    """Return whether a token of version `oldest` is beyond the bound in train step `step`.

    >>> is_stale(3, 5, max_staleness=1), is_stale(3, 6, max_staleness=1)
    (False, True)
    """
    return step - 1 - oldest > max_staleness


def without_stale_tokens(record: TokenRecord, step: int, max_staleness: int) -> TokenRecord:
    """Return a record without the tokens in its loss that are beyond the bound in train step `step`."""
    return replace(record, loss_mask=record.loss_mask & (step - 1 - record.versions <= max_staleness))


def room(*, step: int, max_staleness: int, batch_answers: int, consumed: int, under_way: int) -> int:
    """Return how many more answers may be admitted while version `step` serves; negative when too many are under way.

    `under_way` counts the answers that run or wait to be trained.
    """
    return (max_staleness + step + 1) * batch_answers - consumed - under_way


@dataclass(slots=True)
class Admission:
    """Counts answers (rollouts). A group is admitted as a whole or not at all.

    `consumed` counts the answers of batches that were handed to the trainer; a sibling that failed within such a
    group counts too, so that B answers are consumed by every step and failures cannot widen the bound.

    >>> admission = Admission(batch_answers=4, max_staleness=0)
    >>> admission.start(4); admission.may_admit(2)
    False
    >>> admission.finish(4); admission.consume(4); admission.step = 1; admission.may_admit(4)
    True
    """

    batch_answers: int
    max_staleness: int
    step: int = 0  # the published weight version
    consumed: int = 0
    running: int = 0
    finished: int = 0

    @property
    def capacity(self) -> int:
        """The number of answers that may still be admitted; negative after a resume that found too many waiting."""
        return room(
            step=self.step,
            max_staleness=self.max_staleness,
            batch_answers=self.batch_answers,
            consumed=self.consumed,
            under_way=self.running + self.finished,
        )

    def may_admit(self, group_size: int) -> bool:
        return self.capacity >= group_size

    def start(self, group_size: int) -> None:
        self.running += group_size

    def finish(self, group_size: int) -> None:
        self.running -= group_size
        self.finished += group_size

    def give_back_running(self, group_size: int) -> None:
        """Take back the capacity of a running group that ended without anything to train."""
        self.running -= group_size

    def give_back_finished(self, group_size: int) -> None:
        """Take back the capacity of a finished group that was dropped before it was consumed."""
        self.finished -= group_size

    def consume(self, group_size: int) -> None:
        self.finished -= group_size
        self.consumed += group_size
