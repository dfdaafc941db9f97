"""Programs judged by unit tests, which run where the program is not.

1. unittest classes, plain classes and plain functions are run, each with a verdict of its own; 2. values of every plain
type go there and back as they are; 3. classes, objects, attributes, items, iteration and exceptions of the program
serve tests; 4. each test fails alone: by a wrong value, an exception, a death, a time-out, and the next finds the
program anew, without the objects that it had made; 5. a program that cannot be loaded, or lacks a name, fails; 6. tests
that are at fault themselves, hold nothing, or ask for what cannot be judged are refused by ValueError; 7. skipping is
no pass, and an expected failure is refused; 8. set-up of classes is run, and its failure fails the class; 9.
`stop_early`; 10. files beside the tests can be imported by them, and not by the program; 11. a program
cannot have its tests refused or their process fail: by what it defines a name as, or by very many names; 12. tests that
take all names of the program are refused.
"""

import pytest

from sandboxes import Limits, Pool
from sandboxes.judge import Outcome, UnitTests, Verdict, grade

STACK = """
class Empty(LookupError):
    pass

class Stack:
    LIMIT = 3

    def __init__(self, *items):
        self.items = list(items)
        self.name = "stack"

    @classmethod
    def of(cls, items):
        return cls(*items)

    def push(self, item):
        self.items.append(item)
        return self

    def pop(self):
        if not self.items:
            raise Empty("nothing there")
        return self.items.pop()

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def __iter__(self):
        return iter(self.items)

    def __str__(self):
        return "|".join(map(str, self.items))

def merged(first, second):
    return Stack(*first, *second)

def count(n):
    yield from range(n)
"""


@pytest.fixture
def pool(jails: Pool) -> Pool:
    return jails


async def judged(pool: Pool, code: str, tests: str, **options) -> Verdict:
    return await grade(code, UnitTests(files={"test_it.py": tests}), pool=pool, **options)


def outcomes(verdict: Verdict) -> dict[str, Outcome]:
    return {case.output: case.outcome for case in verdict.cases}


async def test_every_kind_of_test_is_run(pool: Pool) -> None:
    tests = """
import unittest
from solution import add

class Adds(unittest.TestCase):
    def test_right(self):
        self.assertEqual(add(1, 2), 3)
    def test_wrong(self):
        self.assertEqual(add(1, 2), 4)
    def helper(self):
        raise RuntimeError

class TestPlain:
    def test_method(self):
        assert add(2, 2) == 4

def test_function():
    assert add(1, 1) == 2
"""
    verdict = await judged(pool, "def add(a, b):\n    print('thinking')\n    return a + b", tests)
    assert outcomes(verdict) == {
        "test_right": Outcome.PASSED,
        "test_wrong": Outcome.WRONG,
        "test_method": Outcome.PASSED,
        "test_function": Outcome.PASSED,
    }
    assert verdict.partial_reward == 0.75
    assert "3 != 4" in next(case.detail for case in verdict.cases if case.output == "test_wrong")


@pytest.mark.parametrize(
    "value",
    ["None", "[True, 1, 1.5, 'x\\n\\u20ac', b'\\xff']", "(1, (2,), [])", "{1, 2}", "frozenset({(1, 2)})", "10**300",
     "{(1, 2): {'a': [None]}, 3: {}}", "complex(1, 2)", "float('inf')", "''"],
)  # fmt: skip
async def test_plain_values_go_there_and_back(pool: Pool, value: str) -> None:
    tests = f"""
from solution import same
value = {value}
def test_it():
    got = same(value, key=value)
    assert got == [value, value] and [type(one) for one in got] == [type(value)] * 2
"""
    verdict = await judged(pool, "def same(value, *, key):\n    return [value, key]", tests)
    assert verdict.is_passed, verdict


@pytest.mark.parametrize(
    "check",
    [
        "s = Stack(1); s.push(2).push(3); assert [s.pop(), s.pop(), len(s)] == [3, 2, 1]",
        "assert list(Stack(1, 2)) == [1, 2] and 2 in Stack(1, 2) and 5 not in Stack(1, 2)",
        "s = Stack(1); assert s.name == 'stack'; s.name = 'other'; assert s.name == 'other' and s[0] == 1",
        "assert str(Stack(1, 2)) == '1|2' and not Stack() and Stack(0)",
        "assert Stack.LIMIT == 3 and isinstance(Stack.of([1]), Stack) and not isinstance(5, Stack)",
        "s = Stack(1); assert s == s and s.push(2) is s and Stack(1) != Stack(1)",
        "assert list(merged(Stack(1), Stack(2))) == [1, 2]",
        "assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0",
        "import unittest; unittest.TestCase().assertRaises(Empty, Stack().pop)",
        "import unittest; unittest.TestCase().assertRaises(LookupError, Stack().pop)",
        "import unittest; unittest.TestCase().assertRaisesRegex(Empty, 'nothing', Stack().pop)",
        "import unittest; unittest.TestCase().assertRaises(TypeError, merged, 1, 2)",
    ],
)
async def test_objects_of_the_program_serve(pool: Pool, check: str) -> None:
    verdict = await judged(
        pool, STACK, f"from solution import Empty, Stack, count, merged\ndef test_it():\n    {check}"
    )
    assert verdict.is_passed, verdict


async def test_each_test_fails_alone(pool: Pool) -> None:
    code = """
import os, time
def act(how):
    if how == "dies": os._exit(0)
    if how == "hangs":
        while True: pass
    if how == "raises": raise SystemExit(0)
    return how
"""
    tests = "\n".join(
        f"def test_{how}():\n    try:\n        assert act({how!r}) == {how!r}\n    except BaseException:\n        pass"
        if how in ("dies", "hangs")
        else f"def test_{how}():\n    assert act({how!r}) == {how!r}"
        for how in ("well", "dies", "fine", "hangs", "raises", "also")
    )
    verdict = await judged(pool, code, f"from solution import act\n{tests}", limits=Limits(wall_s=2.0))
    assert outcomes(verdict) == {
        "test_well": Outcome.PASSED,
        "test_dies": Outcome.CRASHED,
        "test_fine": Outcome.PASSED,
        "test_hangs": Outcome.TIMEOUT,
        "test_raises": Outcome.WRONG,
        "test_also": Outcome.PASSED,
    }


async def test_objects_die_with_their_process(pool: Pool) -> None:
    code = "import os\nclass Box:\n  def full(self): return True\ndef die(): os._exit(0)"
    tests = """
import solution
box = solution.Box()
def test_dies(): solution.die()
def test_uses():
    try: assert box.full()
    except BaseException: pass
def test_makes(): assert solution.Box().full()
"""
    verdict = await judged(pool, code, tests)
    assert [case.is_passed for case in verdict.cases] == [False, False, True]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("def (", Outcome.CRASHED),
        ("raise SystemExit(0)", Outcome.CRASHED),
        ("import os; os._exit(0)", Outcome.CRASHED),
        ("while True: pass", Outcome.TIMEOUT),
        ("def ad(a, b): return a + b", Outcome.CRASHED),
    ],
)
async def test_a_program_that_cannot_be_used_fails(pool: Pool, code: str, outcome: Outcome) -> None:
    tests = "from solution import add\ndef test_it():\n    assert add(1, 2) == 3"
    verdict = await judged(pool, code, tests, limits=Limits(wall_s=2.0))
    assert ([case.outcome for case in verdict.cases], verdict.reward) == ([outcome], 0.0)


async def test_a_wrong_value_while_the_tests_are_loaded_is_the_programs_fault(pool: Pool) -> None:
    tests = "import solution\nassert solution.VERSION == 1\ndef test_it(): pass"
    assert (await judged(pool, "VERSION = 2", tests)).reward == 0.0
    assert (await judged(pool, "VERSION = 1", tests)).reward == 1.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("import solution, no_such_module\nx = solution.add\ndef test_it(): pass", "No module named"),
        ("import no_such_module\ndef test_it(): pass", "No module named 'no_such_module'"),
        ("x = 1", "hold no test that counts"),
        ("import unittest\n@unittest.skip('never')\ndef test_it(): pass", "hold no test that counts"),
        ("def test_it(tmp_path): pass", "takes arguments"),
        ("import solution\ndef test_it(): solution.add(len, 1)", "no plain data"),
        (
            "import solution\ndef test_it():\n  try: solution.add(lambda: 1, 1)\n  except BaseException: pass",
            "no plain",
        ),
        (
            "import unittest\nclass T(unittest.TestCase):\n  @unittest.expectedFailure\n  def test_it(self): 1/0",
            "to fail",
        ),
    ],
)
async def test_tests_that_are_at_fault_are_refused(pool: Pool, tests: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await judged(pool, "def add(a, b): return a + b", tests)


async def test_skipping_is_no_pass(pool: Pool) -> None:
    tests = """
import unittest, solution
class T(unittest.TestCase):
    def test_it(self):
        if not solution.is_ready():
            self.skipTest("not ready")
    @unittest.skip("never")
    def test_never(self):
        pass
"""
    verdict = await judged(pool, "def is_ready(): return False", tests)
    assert outcomes(verdict) == {"test_it": Outcome.WRONG}


async def test_set_up_of_classes(pool: Pool) -> None:
    tests = """
import unittest, solution
class Good(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.value = solution.one()
    def test_good(self): self.assertEqual(self.value, 1)
class Bad(unittest.TestCase):
    @classmethod
    def setUpClass(cls): solution.fails()
    def test_bad(self): pass
class Sub(unittest.TestCase):
    def test_sub(self):
        for n in (1, 2):
            with self.subTest(n=n): self.assertEqual(solution.one(), n)
"""
    verdict = await judged(pool, "def one(): return 1\ndef fails(): raise ValueError", tests)
    assert outcomes(verdict) == {"test_good": Outcome.PASSED, "test_bad": Outcome.CRASHED, "test_sub": Outcome.WRONG}


async def test_stop_early(pool: Pool) -> None:
    tests = "from solution import f\n" + "\n".join(f"def test_{n}(): assert f({n}) != 1" for n in range(4))
    verdict = await judged(pool, "def f(n): return n", tests, stop_early=True)
    assert [case.outcome for case in verdict.cases] == [Outcome.PASSED, Outcome.WRONG, *[Outcome.SKIPPED] * 2]


async def test_files_beside_the_tests(pool: Pool) -> None:
    files = {
        "helpers.py": "EXPECTED = 3",
        "test_it.py": "import helpers, program\ndef test_it():\n  assert program.f() == helpers.EXPECTED",
    }
    tests = UnitTests(files=files, module="program")
    assert (await grade("def f(): return 3", tests, pool=pool)).reward == 1.0
    assert (await grade("import helpers\ndef f(): return helpers.EXPECTED", tests, pool=pool)).reward == 0.0


@pytest.mark.parametrize("options", [{"files": {"checks.py": ""}}, {"files": {"test.py": ""}, "module": "a.b"}])
def test_what_is_no_unit_test_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="UnitTests"):
        UnitTests(**options)


async def test_other_languages_have_none(pool: Pool) -> None:
    with pytest.raises(ValueError, match="in Python"):
        await grade("", UnitTests(files={"test.py": ""}), pool=pool, language="c")


@pytest.mark.parametrize(
    "definition", ["class made(Exception): pass", "class made: pass", "def made(n): return object()"]
)
async def test_a_program_cannot_have_its_tests_refused(pool: Pool, definition: str) -> None:
    """By defining a name as something else than they take it for."""
    tests = "from solution import made, used\ndef test_it(): assert used(made, made(3)) == 4"
    verdict = await judged(pool, f"{definition}\ndef used(a, b): return 3", tests)
    assert verdict.reward == 0.0


async def test_a_program_of_too_many_names_fails(pool: Pool) -> None:
    code = "for n in range(100_000): globals()[f'name{n}'] = int\ndef add(a, b): return 3"
    verdict = await judged(pool, code, "from solution import add\ndef test_it(): assert add(1, 2) == 3")
    assert [case.outcome for case in verdict.cases] == [Outcome.CRASHED]


def test_taking_all_names_is_refused() -> None:
    """`def abs(x): return 0` would be asked how far the program's results are from the right ones."""
    with pytest.raises(ValueError, match="one by one"):
        UnitTests(files={"test_it.py": "from solution import *\ndef test_it(): assert abs(f(2) - 3.5) < 1e-6"})
