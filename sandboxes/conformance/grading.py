"""Rows 21 to 24: wrong programs that want full reward, under every way of grading."""

from collections.abc import Awaitable, Callable

from sandboxes.conformance.row import Row
from sandboxes.judge import CallCase, StdinCase, UnitTests, grade
from sandboxes.judge.cheats import RIGHT, SCRIPT, TRICKS
from sandboxes.pool import Pool
from sandboxes.spec import Isolation

JAILED = Isolation.NAMESPACES
NUMBER = 7
WORD = f"needle-{10_000_000 + NUMBER}"  # assembled, as a jail may show this file
TEST = f"import solution\ndef test_it(): assert solution.secret({NUMBER}) == {WORD!r}\n"
WAYS = {
    "text": (SCRIPT, [StdinCase(stdin=f"{NUMBER}\n", expected=f"{WORD}\n")]),
    "calls": ("", [CallCase(function="secret", args=[NUMBER], expected=WORD)]),
    "unit tests": ("", UnitTests(files={"test_it.py": TEST})),
}
ENDINGS = ("exits", "raises SystemExit", "skips", "fails as", "stops", "interrupts")
FALSE_OBJECTS = ("is ", "has a giant", "returns", "gets its own")
SEARCHES = ("searches",)
PATCHES = ("patches", "plants", "forges", "writes")


def earn_nothing(*beginnings: str) -> Callable[[Pool], Awaitable[str]]:
    """Return a `Row.run`: tricks whose names begin so must earn nothing, and a right program everything."""

    async def run(pool: Pool) -> str:
        tricks = {name: code for name, code in TRICKS.items() if name.startswith(beginnings)}
        has_walls = pool.capabilities().isolation.covers(JAILED)
        for way, (ending, cases) in WAYS.items():
            if isinstance(cases, UnitTests) and not has_walls:
                continue  # they are refused there
            for name, code in {"is right": RIGHT, **tricks}.items():
                verdict = await grade(code + ending, cases, pool=pool)
                if verdict.reward != (code is RIGHT):
                    return f"a program that {name} earns {verdict.reward} by {way}"
        return ""

    return run


ROWS = (
    Row(number=21, harm="early exits", required="no reward", run=earn_nothing(*ENDINGS)),
    Row(number=22, harm="objects equal to everything", required="no reward", run=earn_nothing(*FALSE_OBJECTS)),
    Row(number=23, harm="search for what is expected", required="not there", needs=JAILED, run=earn_nothing(*SEARCHES)),
    Row(number=24, harm="patches, forged rewards", required="no reward", needs=JAILED, run=earn_nothing(*PATCHES)),
)
