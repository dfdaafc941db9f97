"""The ideal time of a run: the waits of its tools, the work of engine and trainer, and the staleness bound alone.

Engine and trainer work at the same time, each as fast as alone, and nothing else costs anything. So this is the most
that overlap could bring for a distribution of waits; a run falls short of it by contention and the cost of everything
in between. Pure functions.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The cost and the make-up of a train step."""

    generating_s: float  # of the engine, for the rollouts of one step
    training_s: float  # of the trainer, with the push
    groups: int  # per step
    group_size: int
    max_concurrent: int


def ideal_s(work: Work, latency: Callable[[random.Random], float], *, steps: int, max_staleness: int) -> float:
    """Return the time to the end of the last step. Rollouts wait once for a tool; groups end with their last.

    Groups are admitted in order: one of step k (by its number) once version k - max_staleness serves, and while there
    are slots. A step takes the groups that ended first, but at the bound it waits for those that would be too old.

    >>> work = Work(generating_s=1.0, training_s=2.0, groups=1, group_size=1, max_concurrent=8)
    >>> [ideal_s(work, lambda _: 5.0, steps=4, max_staleness=bound) for bound in (0, 4)]
    [32.0, 14.0]
    """
    generator = random.Random(0)
    published = [0.0]  # the time at which each version began to serve
    running: list[float] = []  # the times at which those that hold slots end
    ended: list[tuple[float, int]] = []  # not yet trained: the time, and the version at admission
    slots = max(1, work.max_concurrent // work.group_size)
    engine_free_s, admitted = 0.0, 0
    for step in range(1, steps + 1):
        while admitted < (max_staleness + step) * work.groups:
            allowed_s = published[max(0, admitted // work.groups - max_staleness)]
            start_s = max(allowed_s, heapq.heappop(running)) if len(running) >= slots else allowed_s
            wait_s = max(latency(generator) for _ in range(work.group_size))
            engine_free_s = max(engine_free_s, start_s) + work.generating_s / work.groups
            end_s = engine_free_s + wait_s
            heapq.heappush(running, end_s)
            ended.append((end_s, sum(one <= start_s for one in published) - 1))
            admitted += 1
        ended.sort()
        too_old = [one for one in ended if step - one[1] > max_staleness]
        batch = [*too_old, *(one for one in ended if one not in too_old)][: work.groups]
        ended = [one for one in ended if one not in batch]
        published.append(max(published[-1], *(end_s for end_s, _ in batch)) + work.training_s)
    return published[-1]
