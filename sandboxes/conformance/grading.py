"""Rows 21 to 24: wrong programs that want full reward, under every way of grading."""

from collections.abc import Awaitable, Callable

from sandboxes.conformance.row import JAILED, Row
from sandboxes.judge import CallCase, CustomChecker, SameLines, StdinCase, UnitTests, grade
from sandboxes.judge.cheats import RIGHT, SCRIPT, TRICKS
from sandboxes.pool import Pool

NUMBER = 7
WORD = f"needle-{10_000_000 + NUMBER}"  # assembled, as a jail may show this file
TEST = f"""
import solution, unittest
from solution import secret
class Words(unittest.TestCase):
    def test_equal(self): self.assertEqual(secret({NUMBER}), {WORD!r})
def test_it(): assert solution.secret({NUMBER}) == {WORD!r}
def test_turned(): assert {WORD!r} == secret({NUMBER})
"""
LINES = SameLines()
CHECKER = CustomChecker("def check(stdin, expected, output): return output.split() == expected.split()")
TEXT = [StdinCase(stdin=f"{NUMBER}\n", expected=f"{WORD}\n")]
WAYS = {
    "text": (SCRIPT, TEXT, LINES),
    "calls": ("", [CallCase(function="secret", args=[NUMBER], expected=WORD)], LINES),
    "unit tests": ("", UnitTests(files={"test_it.py": TEST}), LINES),
    "a custom checker": (SCRIPT, TEXT, CHECKER),
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
        for way, (ending, cases, checker) in WAYS.items():
            if (isinstance(cases, UnitTests) or checker is CHECKER) and not has_walls:
                continue  # they are refused there
            for name, code in {"is right": RIGHT, **tricks}.items():
                verdict = await grade(code + ending, cases, pool=pool, checker=checker)
                if {verdict.reward, verdict.partial_reward} != {float(code is RIGHT)}:
                    return f"a program that {name} earns {verdict.partial_reward} by {way}"
        return ""

    return run


ROWS = (
    Row(number=21, harm="early exits", required="no reward", run=earn_nothing(*ENDINGS)),
    Row(number=22, harm="objects equal to everything", required="no reward", run=earn_nothing(*FALSE_OBJECTS)),
    Row(number=23, harm="search for what is expected", required="not there", needs=JAILED, run=earn_nothing(*SEARCHES)),
    Row(number=24, harm="patches, forged rewards", required="no reward", needs=JAILED, run=earn_nothing(*PATCHES)),
)
