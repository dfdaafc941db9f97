"""No trick of `sandboxes/judge/cheats.py` earns anything, by any way of grading.

1. The right program passes by texts, by calls, by unit tests, and by a custom checker; 2. no wrong one does, in a
jail, in a container and in a plain process.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from sandboxes import Isolation, Limits, Pool, open_pool
from sandboxes.judge import CallCase, CustomChecker, StdinCase, UnitTests, Verdict, grade
from sandboxes.judge.cheats import RIGHT, SCRIPT, TRICKS

WORDS = [f"needle-{10_000_000 + n}" for n in range(2)]
TEXTS = [StdinCase(stdin=str(n), expected=word) for n, word in enumerate(WORDS)]
CALLS = [CallCase(function="secret", args=[n], expected=word) for n, word in enumerate(WORDS)]
TESTS = f"""
import solution, unittest
from solution import secret
WORDS = {WORDS}
class Words(unittest.TestCase):
    def test_all(self):
        for n in range(2): self.assertEqual(secret(n), WORDS[n])
def test_one(): assert solution.secret(0) == WORDS[0]
def test_other(): assert WORDS[1] == solution.secret(1)
"""
CHECKER = CustomChecker("def check(stdin, expected, output): return output.split() == expected.split()")
LIMITS = Limits(wall_s=10.0)
WAYS = ("texts", "calls", "unit tests", pytest.param("custom checker", marks=pytest.mark.slow))


async def graded(code: str, way: str, pool: Pool) -> Verdict:
    match way:
        case "texts":
            return await grade(code + SCRIPT, TEXTS, pool=pool, limits=LIMITS)
        case "custom checker":
            return await grade(code + SCRIPT, TEXTS, pool=pool, limits=LIMITS, checker=CHECKER)
        case "calls":
            return await grade(code, CALLS, pool=pool, limits=LIMITS)
        case _:
            return await grade(code, UnitTests(files={"test_it.py": TESTS}), pool=pool, limits=LIMITS)


@pytest.fixture(
    params=["bubblewrap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("docker", "subprocess"))]
)
async def any_pool(request: pytest.FixtureRequest, require) -> AsyncIterator[Pool]:
    await require(request.param)
    async with open_pool(backend=request.param, max_concurrent=4) as pool:
        yield pool


@pytest.mark.parametrize("way", WAYS)
async def test_no_trick_earns_anything(any_pool: Pool, way: str) -> None:
    has_walls = any_pool.capabilities().isolation.covers(Isolation.NAMESPACES)
    if way in ("unit tests", "custom checker") and not has_walls:
        pytest.skip("refused without walls")
    at_once = asyncio.Semaphore(3)

    async def earned(code: str) -> float:
        async with at_once:
            verdict = await graded(code, way, any_pool)
            return max(verdict.reward, verdict.partial_reward)

    assert await earned(RIGHT) == 1.0
    rewards = await asyncio.gather(*(earned(code) for code in TRICKS.values()))
    assert {trick for trick, reward in zip(TRICKS, rewards, strict=True) if reward > 0.0} == set()
