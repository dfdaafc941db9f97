"""The figures of an evaluation: what a model scores, with its uncertainty, and how two models differ on equal tasks.

Pure functions over `Sample`s: rollouts of held-out tasks, several a task. A rollout that failed (its sandbox, its
engine, its workflow) has no reward and is in no figure; failures are counted beside them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Self

from areal_agent.rollout.relay import ApiUse
from areal_agent.types import FinishReason, JsonObject, Status, Task, Trajectory

Z = 1.96
"""Standard errors on each side of an interval that holds the true value in 95 of 100 cases."""
ANSWER = "answer"
"""What a workflow logs (`rollout.log(answer=...)`) so that answers can be put to the vote."""
MIN_SIDE = 1e-9
"""The smallest standard error, or share, that counts as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One rollout of a task."""

    session_id: str
    task_id: str
    status: str  # of `Status`
    reward: float | None  # in total; None: it failed
    answer: str | None  # what the workflow logged as its answer
    num_tokens: int  # sampled; of an API as many as it says, or 0
    num_turns: int
    seconds: float
    is_truncated: bool  # its last answer was ended by the token limit

    @classmethod
    def of(cls, trajectory: Trajectory, *roles: Trajectory) -> Self:
        """Describe a rollout by its own trajectory; tokens and turns are also those of its other roles."""
        every = (trajectory, *roles)
        last = trajectory.turns[-1].completions if trajectory.turns else ()
        used = [ApiUse.of({} if one.turns else one.logged) for one in every]
        answer = trajectory.logged.get(ANSWER)
        return cls(
            session_id=trajectory.session_id,
            task_id=trajectory.task_id,
            status=trajectory.status.value,
            reward=trajectory.rewards.total if trajectory.status is Status.COMPLETED else None,
            answer=None if answer is None else str(answer),
            num_tokens=sum(one.num_sampled_tokens for one in every) + sum(one.num_tokens for one in used),
            num_turns=sum(len(one.turns) for one in every) + sum(one.num_answers for one in used),
            seconds=trajectory.ended_s - trajectory.started_s,
            is_truncated=used[0].is_truncated or any(one.finish_reason is FinishReason.LENGTH for one in last),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of_share(cls, by_task: Sequence[float], num_samples: int | None = None) -> Self:
        """Estimate the mean of a share from each task's own, [n] in 0..1, which are of so many samples in all (n).

        Tasks are drawn, and samples of one task are alike, so the standard error is that of the tasks' means, clustered
        by task: SE = sd / sqrt(n) (Miller, arXiv 2411.00640). The interval is Wilson's (1927) with the
        effective number of samples p (1 - p) / SE^2, which stays within 0..1 and has a width at p = 0 and 1, too. They
        count for no more than there are, for few tasks that happen to be alike prove little.

        >>> Estimate.of_share([1.0, 1.0, 0.0, 1.0]).mean
        0.75
        """
        mean, error = fmean(by_task), _error(by_task)
        number = float(max(len(by_task), num_samples or 0) if MIN_SIDE < mean < 1 - MIN_SIDE else len(by_task))
        if error > MIN_SIDE:
            number = min(number, mean * (1 - mean) / error**2)
        middle = (mean + Z**2 / (2 * number)) / (1 + Z**2 / number)
        half = Z / (1 + Z**2 / number) * math.sqrt(mean * (1 - mean) / number + Z**2 / (4 * number**2))
        return cls(mean=mean, low=max(0.0, middle - half), high=min(1.0, middle + half))

    @classmethod
    def of_mean(cls, by_task: Sequence[float]) -> Self:
        """Estimate the mean of numbers that are one a task, [n], by their standard error."""
        mean, half = fmean(by_task), Z * _error(by_task)
        return cls(mean=mean, low=mean - half, high=mean + half)

    @classmethod
    def of_difference(cls, by_task: Sequence[float]) -> Self:
        """Estimate the mean of differences between two shares, one a task, [n] in -1..1.

        The interval is that of the n differences and two more, 1 and -1 (Bonett and Price 2012, "Adjusted Wald
        confidence interval for a difference of binomial proportions based on paired data"), so that a few tasks that
        all changed, or all did not, are not taken for certainty.
        """
        wider = cls.of_mean([*by_task, 1.0, -1.0])
        return cls(mean=fmean(by_task), low=max(-1.0, wider.low), high=min(1.0, wider.high))

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate that one of k samples is right: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374).

    >>> pass_at_k(2, 1, 1), pass_at_k(2, 1, 2)
    (0.5, 1.0)
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What an evaluation found. Every figure is a mean over tasks of the mean over a task's graded samples."""

    num_tasks: int  # with at least one graded sample
    num_samples: int  # graded
    pass_at_1: Estimate
    pass_at: Mapping[int, float]  # by k, over the tasks with at least k graded samples
    majority: float | None  # success of the most frequent logged answer (no answer is one, too); None: none is logged
    reward_mean: float
    tokens: float  # a sample
    turns: float
    seconds: float
    truncated: float  # the share of samples whose last answer was ended by the token limit
    failures: Mapping[str, int]  # rollouts without a reward, by status

    @classmethod
    def of(cls, samples: Iterable[Sample], success_reward: float) -> Self | None:
        """Return the figures; None where nothing was graded."""
        given = list(samples)
        failures = Counter(one.status for one in given if one.reward is None)
        by_task = _graded(given)
        if not by_task:
            return None
        right = {task: [(one.reward or 0.0) >= success_reward for one in of] for task, of in by_task.items()}
        most = max(len(of) for of in right.values())
        ks = [2**power for power in range(most.bit_length()) if 2**power <= most]
        graded = [one for of in by_task.values() for one in of]
        return cls(
            num_tasks=len(by_task),
            num_samples=len(graded),
            pass_at_1=Estimate.of_share([fmean(of) for of in right.values()], len(graded)),
            pass_at={
                k: fmean(pass_at_k(len(of), sum(of), k) for of in right.values() if len(of) >= k)
                for k in {*ks, most} - {1}
            },
            majority=_majority(by_task, success_reward) if most > 1 else None,
            reward_mean=fmean(fmean(one.reward or 0.0 for one in of) for of in by_task.values()),
            tokens=fmean(one.num_tokens for one in graded),
            turns=fmean(one.num_turns for one in graded),
            seconds=fmean(one.seconds for one in graded),
            truncated=fmean(one.is_truncated for one in graded),
            failures=dict(failures),
        )

    def as_json(self) -> JsonObject:
        return {**asdict(self), "pass_at": {str(k): share for k, share in sorted(self.pass_at.items())}}

    def lines(self) -> list[str]:
        """Return the figures in words."""
        lines = [f"pass@1      {self.pass_at_1}  ({self.num_tasks} tasks, {self.num_samples} graded answers; 95%)"]
        if self.pass_at:
            lines.append("  ".join(f"pass@{k} {share:.3f}" for k, share in sorted(self.pass_at.items())))
        if self.majority is not None:
            lines.append(f"majority    {self.majority:.3f}")
        lines.append(f"mean reward {self.reward_mean:.3f}")
        tokens = f"{self.tokens:.0f}" if self.tokens else "uncounted"
        lines.append(
            f"an answer   {tokens} tokens, {self.turns:.1f} turns, {self.seconds:.1f} s; "
            f"{self.truncated:.1%} cut off by the token limit"
        )
        if self.failures:
            named = ", ".join(f"{number} {status}" for status, number in sorted(self.failures.items()))
            lines.append(f"failed      {sum(self.failures.values())} rollouts, which are in no figure: {named}")
        return lines


def _graded(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    by_task: dict[str, list[Sample]] = {}
    for one in samples:
        if one.reward is not None:
            by_task.setdefault(one.task_id, []).append(one)
    return by_task


def _majority(by_task: Mapping[str, Sequence[Sample]], success_reward: float) -> float | None:
    """Return the success of each task's most frequent answer, the first of several; None if none was ever logged."""
    if all(one.answer is None for samples in by_task.values() for one in samples):
        return None
    found: list[float] = []
    for samples in by_task.values():
        (chosen, _), *_ = Counter(one.answer for one in samples).most_common(1)
        found.append(next((one.reward or 0.0) >= success_reward for one in samples if one.answer == chosen))
    return fmean(found)


def tags_of(task: Task) -> tuple[str, ...]:
    """Return the tags of a task: `tags` (a text or a list) of its data or metadata."""
    given: Any = task.data.get("tags", task.metadata.get("tags"))
    return tuple(map(str, given)) if isinstance(given, list | tuple) else () if given is None else (str(given),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two evaluations of the same tasks, paired by task."""

    difference: Estimate  # of the second's success and the first's, over the tasks that both have
    num_tasks: int
    changed: Sequence[tuple[str, float, float]]  # tasks by how much they changed, with both shares

    @classmethod
    def of(cls, one: Mapping[str, float], other: Mapping[str, float]) -> Self | None:
        """Compare the shares of success by task; None where the two have no task in common.

        The difference of each task is taken first: what makes a task hard for both is then no noise (Miller).
        """
        both = [task for task in one if task in other]
        if not both:
            return None
        moved = sorted(((task, one[task], other[task]) for task in both), key=lambda row: -abs(row[2] - row[1]))
        return cls(
            difference=Estimate.of_difference([other[task] - one[task] for task in both]),
            num_tasks=len(both),
            changed=[row for row in moved if row[1] != row[2]],
        )


def success_by_task(samples: Iterable[Sample], success_reward: float) -> dict[str, float]:
    """Return each task's share of graded samples that are a success."""
    return {task: fmean((one.reward or 0.0) >= success_reward for one in of) for task, of in _graded(samples).items()}
