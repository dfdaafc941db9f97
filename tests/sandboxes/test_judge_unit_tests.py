"""Programs judged by unit tests, which pytest runs where the program is not.

1. unittest classes, plain classes and functions are run, each with a verdict of its own, with what pytest offers:
inheritance, set-up and tear-down, fixtures, parameters, conftest; 2. async tests are run, and what nothing would run is
refused; 3. values of every plain type go there and back as they are; 4. classes, objects, attributes, items, iteration,
contexts, arithmetic, exceptions and output of the program serve tests; 5. a test that has the program judge itself
fails; 6. each test fails alone: by a wrong value, an exception, a death, a time-out, and the next finds the program
anew, without the objects that it had made; 7. a program that cannot be loaded, or lacks a name, fails; 8. tests whose
source shows that they cannot be judged are refused by ValueError; 9. skipping is no pass, nor if the program had it
skipped; 10. errors of set-up and tear-down fail all that they are for; 11. `stop_early`; 12. files beside the tests can
be imported by them, and not by the program; 13. a program cannot have its tests refused or their process fail: by what
it defines a name as, by very many names, by very long answers; 14. limits hold for the program.
"""

from collections.abc import Iterable

import pytest

from sandboxes import Limits, Pool
from sandboxes.judge import CaseVerdict, Outcome, UnitTests, Verdict, grade
from sandboxes.judge.inside.stand_in import Program, StandIn

STACK = """
class Empty(LookupError):
    def __init__(self, said):
        super().__init__(said)
        self.code = 7

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

    def __add__(self, other):
        return Stack(*self, *other)

    def __neg__(self):
        return -self.items[0]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, frames):
        self.items.append(kind)

    def show(self):
        print("shown")

class Deep(Stack):
    pass

def apply(function, value):
    return function(value)

def merged(first, second):
    return Stack(*first, *second)

def count(n):
    yield from range(n)
"""


@pytest.fixture
def backend() -> str:
    return "jail"


async def judged(pool: Pool, code: str, tests: str, **options) -> Verdict:
    return await grade(code, UnitTests(files={"test_it.py": tests}), pool=pool, **options)


async def judged_each(pool: Pool, code: str, tests: Iterable[str], **options) -> tuple[CaseVerdict, ...]:
    """The verdicts on tests that are each in a file of their own."""
    files = {f"test_{number}.py": test for number, test in enumerate(tests)}
    verdict = await grade(code, UnitTests(files=files), pool=pool, **options)
    assert len(verdict.cases) == len(files), verdict
    return verdict.cases


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


async def test_plain_values_go_there_and_back(pool: Pool) -> None:
    tests = r"""
import pytest
from solution import same
@pytest.mark.parametrize(
    "value",
    [None, [True, 1, 1.5, "x\n\u20ac", b"\xff"], (1, (2,), []), {1, 2}, frozenset({(1, 2)}), 10**300,
     {(1, 2): {"a": [None]}, 3: {}}, complex(1, 2), float("inf"), ""],
)
def test_it(value):
    got = same(value, key=value)
    assert got == [value, value] and [type(one) for one in got] == [type(value)] * 2
"""
    verdict = await judged(pool, "def same(value, *, key):\n    return [value, key]", tests)
    assert [case.is_passed for case in verdict.cases] == [True] * 10, verdict


async def test_objects_of_the_program_serve(pool: Pool) -> None:
    checks = [
        "s = Stack(1); s.push(2).push(3); assert [s.pop(), s.pop(), len(s)] == [3, 2, 1]",
        "assert list(Stack(1, 2)) == [1, 2] and 2 in Stack(1, 2) and 5 not in Stack(1, 2)",
        "s = Stack(1); assert s.name == 'stack'; s.name = 'other'; assert s.name == 'other' and s[0] == 1",
        "assert str(Stack(1, 2)) == '1|2' and not Stack() and Stack(0)",
        "assert Stack.LIMIT == 3 and isinstance(Stack.of([1]), Stack) and not isinstance(5, Stack)",
        "s = Stack(1); assert s.push(2)[1] == 2 and s != None and not s == None and s in {s}",
        "with Stack(1) as s: assert [next(iter(s + Stack(2))), -s] == [1, -1]",
        "import pytest\n    with pytest.raises(LookupError) as e, Stack(): Stack().pop()\n    assert e.value.code == 7",
        "assert isinstance(Deep(1), Stack) and issubclass(Deep, Stack) and Deep(1).pop() == 1",
        "assert apply(len, 'abc') == 3 and apply(Stack, [1, 2]).pop() == [1, 2]",
        "import contextlib, io\n    with contextlib.redirect_stdout(io.StringIO()) as said: Stack().show()\n"
        "    assert said.getvalue() == 'shown\\n'",
        "g = count(10**9); assert [next(g), next(iter(g)), next(g)] == [0, 1, 2]",
        "assert list(merged(Stack(1), Stack(2))) == [1, 2]",
        "assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0",
        "import unittest; unittest.TestCase().assertRaises(Empty, Stack().pop)",
        "import unittest; unittest.TestCase().assertRaises(LookupError, Stack().pop)",
        "import unittest; unittest.TestCase().assertRaisesRegex(Empty, 'nothing', Stack().pop)",
        "import unittest; unittest.TestCase().assertRaises(TypeError, merged, 1, 2)",
    ]
    imports = "from solution import Deep, Empty, Stack, apply, count, merged"
    cases = await judged_each(pool, STACK, [f"{imports}\ndef test_it():\n    {check}" for check in checks])
    assert [(check, case) for check, case in zip(checks, cases, strict=True) if not case.is_passed] == []


async def test_each_test_fails_alone(pool: Pool) -> None:
    code = """
import os, time
def act(how):
    if how == "dies": os._exit(0)
    if how == "hangs": time.sleep(1000)
    if how == "raises": raise SystemExit(0)
    return how
"""
    tests = "\n".join(
        f"def test_{how}():\n    try:\n        assert act({how!r}) == {how!r}\n    except BaseException:\n        pass"
        if how in ("dies", "hangs")
        else f"def test_{how}():\n    assert act({how!r}) == {how!r}"
        for how in ("well", "dies", "fine", "hangs", "raises", "also")
    )
    verdict = await judged(pool, code, f"from solution import act\n{tests}", limits=Limits(wall_s=1.0))
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
        ("import time; time.sleep(1000)", Outcome.TIMEOUT),
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
        ("x = 1", "hold no test"),
        ("import pytest\npytest.skip('no', allow_module_level=True)", "skips itself"),
        ("def test_it():\n  assert (1 == 2, 'no')", "always true"),
        ("from solution import *\ndef test_it(): assert abs(f(2) - 3.5) < 1e-6", "one by one"),
        ("from solution import f\ndef test_it():\n  a = f(1)\n  assert a is not f(2)", "line 4: `is` cannot see"),
    ],
)
async def test_tests_that_are_at_fault_are_refused(pool: Pool, tests: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await judged(pool, "def add(a, b): return a + b", tests)


async def test_a_test_that_decides_nothing_fails(pool: Pool) -> None:
    told = {
        "@pytest.mark.xfail\ndef test_it(): assert f() == 2": "expected to fail",
        "def test_it():\n  if f() == 1: pytest.xfail('no')": "expected to fail",
        "@pytest.mark.skipif(hasattr(solution, 'f'), reason='no')\ndef test_it(): pass": "Skipped: no",
        "def test_it():\n  if f() == 1: pytest.skip('no')": "Skipped: no",
        "def test_it(): return f() == 2": "returns a bool",
        "def run(): yield\ndef test_it(): return run()": "returns a generator",
        "@pytest.fixture\nasync def fix(): assert f() == 2\ndef test_it(fix): pass": "async fixture",
        "class T(unittest.TestCase):\n  async def test_it(self): assert f() == 2": "returns a coroutine",
        "class T(unittest.TestCase):\n  @unittest.expectedFailure\n  def test_it(self): 1 / 0": "expected to fail",
        "def test_it():\n  t = Thread(target=lambda: f() / 0); t.start(); t.join()": "Exception in thread",
        "def test_it():\n  t = Thread(target=solution.leave); t.start(); t.join()": "Exception in thread",
        "def test_it(): assert all(map(lambda n: solution.stop() == n, [1]))": "the program raised StopIteration",
        "def test_it(monkeypatch): monkeypatch.setattr(solution.It, 'x', 1)": "sets 'x' in It",
        "def test_it(monkeypatch): monkeypatch.setattr(solution, 'f', 1)": "sets 'f' in the program",
        "def test_it(): solution.It(lambda: 1)": "no plain data",
    }
    imports = "import pytest, solution, unittest\nfrom solution import f\nfrom threading import Thread"
    code = "def f(): return 1\ndef leave(): raise SystemExit\ndef stop(): raise StopIteration\nclass It: x = 0"
    cases = await judged_each(pool, code, [f"{imports}\n{test}" for test in told])
    for test, case in zip(told, cases, strict=True):
        assert (case.score, told[test] in case.detail) == (0.0, True), (test, case)
    at_loading = {
        "def test_it():\n  yield f() == 2": "not in tests",
        "class Mine(solution.It): pass\ndef test_it(): pass": "derives a class",
    }
    for test, detail in at_loading.items():
        verdict = await judged(pool, code, f"{imports}\n{test}")
        assert (verdict.reward, detail in verdict.cases[0].detail) == (0.0, True), verdict


def test_forged_ancestors_are_not_believed() -> None:
    program = Program(lambda _request: {})
    StandIn("solution", program, {"A": ("class", []), "B": ("class", ["A"]), "C": ("class", ["B"])})
    assert issubclass(program.classes["B"], program.classes["A"])
    assert not issubclass(program.classes["C"], program.classes["B"])  # a real C would derive from A too


async def test_a_test_that_has_the_program_judge_itself_fails(pool: Pool) -> None:
    told = {
        "a, b = Stack(1), Stack(1)\n    assert a == b": "compares an object",
        "a, b = merged([], []), merged([], [])\n    assert [a] != [b]": "compares an object",
        "assert merged([], []) < 3": "compares an object",
        "assert merged([], []) + 3": "a value of its own",
        "try: apply(Mock(), 1)\n    except BaseException: pass": "no plain data",
        "solution.merged = 1": "sets 'merged' in the program",
    }
    imports = "import solution\nfrom solution import Stack, apply, merged\nfrom unittest.mock import Mock"
    cases = await judged_each(pool, STACK, [f"{imports}\ndef test_it():\n    {check}" for check in told])
    for check, case in zip(told, cases, strict=True):
        assert (case.score, told[check] in case.detail) == (0.0, True), (check, case)


async def test_what_pytest_offers(pool: Pool) -> None:
    files = {
        "conftest.py": "import pytest, solution\n@pytest.fixture\ndef made(tmp_path):\n    yield solution.make()",
        "test_it.py": """
import asyncio, pytest, unittest, solution
seen = []
def setup_module(): seen.append("module")
class Base:
    @classmethod
    def setup_class(cls): seen.append("class")
    def setup_method(self): self.n = solution.make()
    def test_base(self): assert self.n == 1 and seen == ["module", "class"]
class TestDerived(Base):
    pass
@pytest.mark.parametrize("n", [1, 2])
def test_fixture(made, n): assert made == n
async def test_async(made):
    await asyncio.sleep(0)
    assert await solution.later(made) == 1
    async with solution.Later() as it:
        assert [n async for n in it] == [0, 1]
class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_isolated(self): self.assertEqual(await solution.later(1), 2)
def test_output(capsys):
    solution.make()
    assert capsys.readouterr().out == "made\\n" and 1.0 == pytest.approx(1 + 1e-9)
""",
    }
    code = """
import asyncio
def make(): print("made"); return 1
async def later(n): await asyncio.sleep(0); return n
class Later:
    async def __aenter__(self): return self
    async def __aexit__(self, *error): pass
    async def __aiter__(self):
        yield 0
        yield 1
"""
    verdict = await grade(code, UnitTests(files=files), pool=pool)
    assert [(case.output, case.is_passed) for case in verdict.cases] == [
        ("test_base", True),
        ("test_fixture[1]", True),
        ("test_fixture[2]", False),
        ("test_async", True),
        ("test_isolated", False),
        ("test_output", True),
    ], verdict


async def test_an_error_of_a_tear_down_fails_all_that_it_is_for(pool: Pool) -> None:
    tests = """
import unittest, solution
class First(unittest.TestCase):
    @classmethod
    def tearDownClass(cls): assert solution.one() == 1
    def test_a(self): pass
    def test_b(self): pass
class TestOther:
    def teardown_method(self): assert solution.one() == 2
    def test_c(self): pass
    def test_d(self): assert 0
def test_e(): pass
"""
    verdict = await judged(pool, "def one(): return 2", tests)
    assert [case.is_passed for case in verdict.cases] == [False, False, True, False, True]
    assert "2 == 1" in verdict.cases[0].detail


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
    assert outcomes(verdict) == {"test_good": Outcome.PASSED, "test_bad": Outcome.WRONG, "test_sub": Outcome.WRONG}


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


WRONG_KINDS = [
    "class made(Exception): pass",
    "class made: pass",
    "def made(n): return object()",
    "def made(n): return [[]] * 1_200_000",
    "def made(n): raise type('\\ud800', (ValueError,), {})('\\ud800')",
    "def made(n): raise SystemExit(0)",
    "def made(n): raise ModuleNotFoundError('none')",
    "made = 5",
]
"""Definitions of a name as something else than its tests take it for."""


@pytest.mark.parametrize("definition", WRONG_KINDS)
async def test_a_program_cannot_have_its_tests_refused_as_they_are_loaded(pool: Pool, definition: str) -> None:
    tests = "import pytest\nfrom solution import made, used\nvalue = used(made, made(3)) == 4 or pytest.fail()\n"
    verdict = await judged(pool, f"{definition}\ndef used(a, b): return 3", tests)
    assert verdict.reward == 0.0
    assert [case.detail.encode() for case in verdict.cases]


async def test_a_program_cannot_have_its_tests_refused_as_they_run(pool: Pool) -> None:
    names = [f"made{number}" for number in range(len(WRONG_KINDS))]
    code = "\n".join(definition.replace("made", name) for name, definition in zip(names, WRONG_KINDS, strict=True))
    tests = (f"from solution import {name}, used\ndef test_it(): assert used({name}, {name}(3)) == 4" for name in names)
    cases = await judged_each(pool, f"{code}\ndef used(a, b): return 3", tests)
    assert [(case.score, bool(case.detail.encode())) for case in cases] == [(0.0, True)] * len(names), cases


async def test_limits_hold_for_the_program(pool: Pool) -> None:
    code = """
import os
def hoard(): bytearray(2**28); return 1
def talk(): os.write(2, b'x' * 2**15); return 1
def fill(): open('big', 'wb').write(bytes(2**22)); return 1
"""
    acts = ("hoard", "talk", "fill")
    tests = "import solution\n" + "\n".join(f"def test_{act}(): assert solution.{act}() == 1" for act in acts)
    limits = Limits(wall_s=10.0, memory_bytes=2**26, file_bytes=2**20, output_bytes=2**14)
    assert (await judged(pool, code, tests)).reward == 1.0
    hoarded, talked, filled = (case.outcome for case in (await judged(pool, code, tests, limits=limits)).cases)
    assert hoarded in (Outcome.MEMORY, Outcome.WRONG)  # by the kernel, or by MemoryError
    assert (talked, filled) == (Outcome.OUTPUT_LIMIT, Outcome.DISK)


async def test_a_program_of_too_many_names_fails(pool: Pool) -> None:
    code = "for n in range(100_000): globals()[f'name{n}'] = int\ndef add(a, b): return 3"
    verdict = await judged(pool, code, "from solution import add\ndef test_it(): assert add(1, 2) == 3")
    assert [case.outcome for case in verdict.cases] == [Outcome.CRASHED]
