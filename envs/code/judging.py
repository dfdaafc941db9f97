"""A task's cases, and the reward of a program.

A task holds its cases as JSON: `{"function": ..., "cases": [[args, result], ...]}`, and in `visible`, in the same form,
those that the model may see.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from areal_agent import Rollout
from sandboxes import Pool, open_pool
from sandboxes.judge import CallCase, CaseVerdict, CloseNumbers, Verdict, grade

Task = Mapping[str, Any]

CLOSE = CloseNumbers()


def open_sandboxes(rollout: Rollout) -> AbstractAsyncContextManager[Pool]:
    """Open the pool that all rollouts of a run share."""
    return open_pool(**rollout.sandbox)


async def reward_of(code: str | None, task: Task, pool: Pool) -> float:
    """Return 1.0 when every hidden case is passed, else 0.0, also without a program."""
    if code is None:
        return 0.0
    return (await judged(code, task, "cases", pool, stop_early=True)).reward


async def visible_report(code: str, task: Task, pool: Pool) -> tuple[bool, str]:
    """Return whether the visible cases are passed, and a report for the model."""
    verdict = await judged(code, task, "visible", pool)
    lines = [f"{verdict.num_passed} of {len(verdict.cases)} tests passed."]
    for (args, expected), case in zip(task["visible"], verdict.cases, strict=True):
        if not case.is_passed:
            lines.append(told(task["function"], args, expected, case))
            break
    return verdict.is_passed, "\n".join(lines)


async def judged(code: str, task: Task, which: str, pool: Pool, *, stop_early: bool = False) -> Verdict:
    cases = [CallCase(function=task["function"], args=args, expected=expected) for args, expected in task[which]]
    return await grade(code, cases, pool=pool, checker=CLOSE, stop_early=stop_early)


def told(function: str, args: Sequence[Any], expected: Any, case: CaseVerdict) -> str:
    """Return one failed case as a line.

    >>> from sandboxes.judge import Outcome
    >>> told("f", [3], 12, CaseVerdict(outcome=Outcome.WRONG, output="11"))
    'f(3) is 11, not 12.'
    """
    call = f"{function}({', '.join(map(repr, args))})"
    if case.output:
        return f"{call} is {case.output}, not {expected!r}."
    last_line = case.detail.rpartition("\n")[2]
    return f"{call} fails ({case.outcome.value}): {last_line}"
