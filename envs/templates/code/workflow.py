"""The model writes a program, which hidden cases judge in sandboxes."""

import re
from contextlib import AbstractAsyncContextManager
from typing import Any

from areal_agent import Rollout
from sandboxes import Pool, open_pool
from sandboxes.judge import CallCase, grade

FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def open_sandboxes(rollout: Rollout) -> AbstractAsyncContextManager[Pool]:
    """Open the pool that all rollouts of a run share."""
    return open_pool(**rollout.sandbox)


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the program passes every case, else 0.0."""
    pool = await rollout.shared(open_sandboxes)
    reply = await rollout.client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": task["question"]}]
    )
    cases = [CallCase(function="f", args=args, expected=expected) for args, expected in task["cases"]]
    verdict = await grade(program_in(reply.choices[0].message.content or ""), cases, pool=pool)
    rollout.log(passed=verdict.partial_reward)
    return verdict.reward


def program_in(said: str) -> str:
    r"""Return the last fenced block of an answer, or all of it.

    >>> program_in("So:\n```python\nx = 1\n```"), program_in("x = 1")
    ('x = 1\n', 'x = 1')
    """
    blocks: list[str] = FENCED.findall(said)
    return blocks[-1] if blocks else said
