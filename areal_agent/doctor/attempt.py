"""The boundary that turns the failure of a check into a finding, so that it hides no other. It knows no check."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.report import Report
from areal_agent.errors import ArealAgentError

T = TypeVar("T")

CALL_S = 300.0
"""How long one thing that is asked of somebody else may take."""


async def attempt(report: Report, check: str, work: Awaitable[T], *, limit_s: float | None = CALL_S) -> T | None:
    """What `work` gives; None when it fails or takes longer than `limit_s`, which is reported."""
    report.begin(check)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except ArealAgentError as error:
        report.add(Finding.of_error(check, error))
    except Exception as error:  # foreign code: a user's tasks, a tokenizer, a template
        cause = " ".join(str(error).split())[:300]
        found = f"no answer within {limit_s:g} s" if limit.expired() else f"{type(error).__name__}: {cause}"
        report.add(Finding(check=check, state=State.FAIL, found=found))
    return None


async def examined(report: Report, check: str, work: Awaitable[list[Finding]]) -> None:
    """Report what a check finds, or its failure."""
    for finding in await attempt(report, check, work) or ():
        report.add(finding)
