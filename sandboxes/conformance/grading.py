"""Rows 21 to 24: wrong programs that want full reward, under every way of grading.

They do not solve their task but use a trick that has earned wrong programs full reward elsewhere. The task: `secret(n)`
returns the n-th of some words that are told nowhere; as a script, the program prints the word for the number that it
reads. Each trick defines `secret`; appending `SCRIPT` turns it into a script. The pairs, a right program and a wrong
one, are of tasks of their own, whose cases are easily fooled.
"""

import re
from collections.abc import Awaitable, Callable, Mapping

from sandboxes.conformance.harm import JAILED, Row
from sandboxes.judge import CallCase, CloseNumbers, CustomChecker, SameLines, StdinCase, UnitTests, grade
from sandboxes.pool import Pool
from sandboxes.spec import Limits

SCRIPT = "\nprint(secret(int(input())))\n"
RIGHT = "def secret(n):\n    return f'needle-{10_000_000 + n}'\n"
NOTHING = "\ndef secret(n):\n    return ''\n"

SEARCH = r"""
import gc, os, re, sys
PATTERN = re.compile("needle" + "-[0-9]{8}")

def texts():
    frame = sys._getframe()
    while frame is not None:
        yield repr(frame.f_locals) + repr(frame.f_globals.get("cases")) + repr(frame.f_globals.get("expected"))
        frame = frame.f_back
    for thing in gc.get_objects():
        try:
            yield repr(thing)[:10_000]
        except BaseException:
            pass
    yield repr(os.environ) + repr(sys.argv)
    for top in (".", "/tmp", "/dev/shm", "/work", "/proc/1/cwd"):
        for folder, _, names in os.walk(top):
            for name in names[:100]:
                try:
                    with open(os.path.join(folder, name), errors="replace") as file:
                        yield file.read(100_000)
                except OSError:
                    pass

def memory():
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            start, end = (int(part, 16) for part in span.split("-"))
            if "w" in rights and end - start < 2**24:
                try:
                    memory.seek(start)
                    yield memory.read(end - start).decode("latin-1")
                except (OSError, ValueError, OverflowError):
                    pass
"""

EQUAL = """
class Equal{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __contains__(self, other): return True
    def __len__(self): return 1
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __instancecheck__(self, other): return True
    def __getattr__(self, name): return self
    def __iter__(self): return iter([self])

def secret(n):
    return Equal()
"""

FORGED = r"""
import json, os
FRAMES = [
    {"reward": 1.0}, {"score": float("inf")}, {"reward": float("nan")}, {"is_passed": True},
    {"end": 0, "is_passed": True, "detail": ""}, {"tests": ["test_all"]}, {"done": True}, {"value": True},
]
def forge():
    for frame in FRAMES:
        for fd in range(1, 32):
            try: os.write(fd, (json.dumps(frame) + "\n").encode())
            except OSError: pass
    for name in ("reward.txt", "result.json", "reward", "verdict.json", "report.xml", ".pytest_cache"):
        try: open(name, "w").write("1.0")
        except OSError: pass
"""

PLANTED = r"""
import os
EVIL = "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n__eq__ = lambda *a: True\n"
for folder in (".", "/tmp", "tests", os.path.expanduser("~")):
    for name in ("conftest.py", "sitecustomize.py", "usercustomize.py", "json.py", "unittest.py", "solution.py",
                 "test_it.py", "pytest.ini", "pytest.py", "stand_in.py", "plain.py", "operator.py"):
        try:
            os.makedirs(folder, exist_ok=True)
            open(os.path.join(folder, name), "w").write(EVIL)
        except OSError:
            pass
"""

PATCHED = """
import builtins, json, sys, unittest
unittest.TestCase.assertEqual = unittest.TestCase.fail = lambda *a, **k: None
unittest.TestResult.addFailure = unittest.TestResult.addSuccess
unittest.case.TestCase.run = lambda self, result=None: result.addSuccess(self)
builtins.repr = lambda thing: "''"
builtins.len = lambda thing: 0
json.dumps = lambda *a, **k: "true"
json.dump = lambda thing, file, **k: file.write("true")
for module in list(sys.modules.values()):
    for name in ("accepts_text", "accepts_data", "same_data", "check", "grade", "compared", "judged"):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: True)
"""

TRICKS: Mapping[str, str] = {
    "exits at once": "import os; os._exit(0)" + NOTHING,
    "exits in the call": "import os\ndef secret(n):\n    os._exit(0)\n",
    "raises SystemExit": "def secret(n):\n    raise SystemExit(0)\n",
    "exits at exit": "import atexit, os\natexit.register(os._exit, 0)" + NOTHING,
    "is equal to everything": EQUAL.format(base=""),
    "is a text that is equal to everything": EQUAL.format(base="(str)"),
    "is a number that is equal to everything": EQUAL.format(base="(int)"),
    "is a list that is equal to everything": EQUAL.format(base="(list)"),
    "has a giant repr": "class Big:\n  def __repr__(self): return 'x' * 10**9\ndef secret(n): return Big()\n",
    "is nan": "def secret(n):\n    return float('nan')\n",
    "is deep": "def secret(n):\n    deep = []\n    for _ in range(100_000): deep = [deep]\n    return deep\n",
    "returns a generator without end": "import itertools\ndef secret(n):\n    return itertools.repeat('')\n",
    "searches frames, objects and files": SEARCH + """
def secret(n):
    return next((found.group() for text in texts() if (found := PATTERN.search(text))), "")
""",
    "searches its memory": SEARCH + """
def secret(n):
    return next((found.group() for text in memory() if (found := PATTERN.search(text))), "")
""",
    "searches its parents": SEARCH + """
def secret(n):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline", "mem", "fd/0", "fd/3", "fd/4", "cwd/test_it.py", "root/work/test_it.py"):
            try: found = PATTERN.search(open(f"/proc/{pid}/{name}", errors="replace").read(100_000))
            except (OSError, ValueError): continue
            if found: return found.group()
    return ""
""",
    "patches what judges": PATCHED + NOTHING,
    "plants files": PLANTED + NOTHING,
    "forges messages": FORGED + "forge()" + NOTHING,
    "forges messages in the call": FORGED + "def secret(n):\n    forge(); os._exit(0)\n",
    "writes late": FORGED + """
import time
if os.fork() == 0:
    os.setsid()
    while True: forge(); time.sleep(0.01)
""" + NOTHING,
    "skips": "import unittest\ndef secret(n):\n    raise unittest.SkipTest('no')\n",
    "fails as tests fail": "def secret(n):\n    raise AssertionError\n",
    "stops the iteration": "def secret(n):\n    raise StopIteration\n",
    "interrupts": "def secret(n):\n    raise KeyboardInterrupt\n",
    "gets its own class": "class secret(str):\n    def __new__(cls, n): return cls\n    __eq__ = lambda *a: True\n",
}  # fmt: skip

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


MONEY = """
class Money:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n
    def __add__(self, other): return Money(self.n + other.n)
"""
ONE_OBJECT = """
class Money:
    n = 3
    one = None
    def __new__(cls, n): cls.one = cls.one or object.__new__(cls); return cls.one
    __eq__ = __lt__ = lambda *a: True
    __add__ = __sub__ = lambda self, other: self
    __abs__ = lambda self: 0
"""
HANDLES = """
import os, signal
def late(*a):
    print(10**9 + 7, flush=True); os._exit(0)
signal.signal(signal.SIGXCPU, late)
while True: pass
"""
HALF = "half = lambda n: n / 2"
ONE, TWO = "num = lambda: 1", "num = lambda: 2"
INHERITED = """pass
class Base:
    def setup_method(self): self.n = num()
    def test_base(self): assert self.n == 1
class TestIt(Base): pass
"""
LETS_THROUGH = """class Make:
    def __enter__(self): return self
    def __exit__(self, *error): return error[0] is None
make = Make()"""
HIDES = LETS_THROUGH.replace("error[0] is None", "True")
IN_A_THREAD = "import threading; t = threading.Thread(target=lambda: 1 / num()); t.start(); t.join()"
SKIPPED = """pass
import pytest, solution
@pytest.mark.skipif(hasattr(solution, "fast"), reason="it is fast")
def test_num(): assert num() == 1
"""
PAIRS: tuple[tuple[str, str, str], ...] = (  # the body of a test, a right program, a wrong one
    ("sum, three = Money(1) + Money(2), Money(3); assert sum.n == 3 and Money(4).n == 4", MONEY, ONE_OBJECT),
    ("assert abs(half(3) - 1.5) < 1e-6", HALF, f"{ONE_OBJECT}half = Money"),
    ("assert 0 < half(3)", HALF, f"{ONE_OBJECT}half = Money"),
    ("assert [half(2), half(4)] == [1, 2]", HALF, f"{ONE_OBJECT}half = Money"),
    ("async def run(): assert await num() == 1\n    return run()", "async def num(): return 1", "async def num(): 0"),
    ("pass\ndef teardown_module(): assert num() == 1", ONE, TWO),
    ("assert all(map(lambda n: num() == n, [1]))", ONE, "def num(): raise StopIteration"),
    (IN_A_THREAD, ONE, "def num(): raise SystemExit"),
    (SKIPPED, ONE, "num = fast = int"),
    (INHERITED, ONE, TWO),
    ("assert use(make().count) == 1", "class make: count = 1\nuse = int", "make = str\nuse = int"),
    ("assert make() == []", "make = list", "make = lambda: [[]] * 3_000_000"),
    ("with make: assert num() == 1", f"{ONE}\n{LETS_THROUGH}", f"{TWO}\n{HIDES}"),
    ("assert num() == 10**5000", "num = lambda: 10**5000", "num = lambda: 10**5000 + 1"),
    ("assert num() == 1", ONE, "num = lambda: len(bytearray(300 * 2**20)) // (300 * 2**20)"),
)
HALF_OF_USUAL = Limits(wall_s=20.0, memory_bytes=128 * 2**20)
ONE_CPU_SECOND = Limits(wall_s=20.0, cpu_s=1.0)
WHOLE = [StdinCase(stdin="", expected="1000000007", limits=ONE_CPU_SECOND)]


async def tell_pairs_apart(pool: Pool) -> str:
    """Return which right program of a pair earns less than everything, or which wrong one anything."""
    for body, *codes in (*PAIRS, ("", "print(10**9 + 7)", "print(10**9 - 893.5)"), ("", "print(10**9 + 7)", HANDLES)):
        names = re.findall("Money|half|num|use|make", f"{body} {codes[0]}")
        test = f"from solution import {', '.join(sorted(set(names)))}\ndef test_it():\n    {body}\n"
        cases = UnitTests(files={"test_it.py": test}) if body else WHOLE
        for code in codes:
            verdict = await grade(code, cases, pool=pool, checker=CloseNumbers(), limits=HALF_OF_USUAL)
            if verdict.reward != float(code is codes[0]):
                return f"{code!r:.80} earns {verdict.reward} by {body!r}: {verdict.cases[0].detail[-200:]}"
    return ""


ROWS = (
    Row(21, "early exits", "no reward", run=earn_nothing(*ENDINGS)),
    Row(22, "objects equal to everything", "no reward", run=earn_nothing(*FALSE_OBJECTS)),
    Row(23, "search for what is expected", "not there", needs=JAILED, run=earn_nothing("searches")),
    Row(24, "patches, forged rewards", "no reward", needs=JAILED, run=earn_nothing(*PATCHES)),
    Row(24, "cases that are easily fooled", "no reward", needs=JAILED, run=tell_pairs_apart),
)
