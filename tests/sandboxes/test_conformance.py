"""The hostile suite itself.

1. Every row holds in every backend that promises it (those that take long, and all in containers, by `python -m
sandboxes check`, which .ci/run runs); 2. a row sees a wall that is missing; 3. a row beyond a backend is not run; 4.
one that fails tells what it saw; 5. a working directory whose name a box has too is no leak.
"""

import tempfile

import pytest

from sandboxes import Isolation, Pool
from sandboxes.conformance import ROWS, Row, Verdict, check


def row_of(number: int) -> Row:
    return next(row for row in ROWS if row.number == number)


GRADING = range(21, 25)
"""These take long. The command runs them: in .ci/run in jails and containers, in test_command.py without walls."""


@pytest.mark.parametrize("backend", ["subprocess", "jail"])
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row.number}-{row.harm}") for row in ROWS if row.number not in GRADING]
)
async def test_row_holds(pool: Pool, row: Row) -> None:
    verdict, seen = await check(row, pool)
    assert verdict is (Verdict.HELD if row.is_within(pool) else Verdict.BEYOND), seen


@pytest.mark.parametrize("number", [16, 19, 20])
async def test_row_sees_that_a_wall_is_missing(pool: Pool, number: int) -> None:
    assert await row_of(number).run(pool)


@pytest.mark.parametrize("backend", ["jail"])
@pytest.mark.parametrize("folder", ["/", "/usr", tempfile.gettempdir()])
async def test_a_folder_of_the_box_itself_is_no_leak(pool: Pool, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert await check(row_of(20), pool) == (Verdict.HELD, "")


async def test_row_beyond_a_backend_is_not_run(pool: Pool) -> None:
    ran: list[Pool] = []

    async def run(pool: Pool) -> str:
        ran.append(pool)
        return ""

    row = Row(number=1, harm="any", required="nothing", run=run, needs=Isolation.NAMESPACES)
    assert await check(row, pool) == (Verdict.BEYOND, "")
    assert ran == []


async def test_row_fails_with_what_it_saw(pool: Pool) -> None:
    async def run(_pool: Pool) -> str:
        return "seen"

    row = Row(number=1, harm="any", required="nothing", run=run)
    assert await check(row, pool) == (Verdict.FAILED, "seen")
