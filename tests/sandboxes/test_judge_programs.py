"""Programs judged by texts and by calls, in real sandboxes.

1. A right program passes and a wrong one does not, by texts and by calls; 2. each language of the table, and one that
is not in it; 3. how a program fails is told; 4. each case counts for its part; 5. `stop_early` leaves out what follows
the first failure; 6. a case may have limits of its own; 7. a custom checker decides, may give a part, one that fails
passes nothing, and one that fails on what is expected or evaluates outputs is refused; 8. what the program prints in a
call is no result; 9. what cannot be judged is refused; 10. a sandbox that fails, or that has not the language, raises
SandboxError: it is no verdict; 11. a text that is precompiled does what its source does, in a Python of any version;
12. a result that JSON cannot say equals nothing.
"""

import shutil

import pytest

from areal_agent.errors import SandboxError
from sandboxes import Limits, Pool, Sandbox, open_pool
from sandboxes.judge import CallCase, CloseNumbers, CustomChecker, Exact, Language, Outcome, StdinCase, UnitTests, grade
from sandboxes.judge.languages import precompiled

SUMS = [StdinCase(stdin=f"{n} 2", expected=str(n + 2)) for n in range(3)]
ADDS = [CallCase(function="add", args=[n, 2], expected=n + 2) for n in range(3)]
READS_AND_ADDS = "print(sum(map(int, input().split())))"
ADD = "def add(a, b):\n    return a + b"
IN_A_CLASS = "class Solution:\n    def add(self, a, b):\n        return a + b"
BY_LANGUAGE = {
    "python": READS_AND_ADDS,
    "c": '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
    "javascript": 'const [a, b] = require("fs").readFileSync(0, "utf8").split(" ").map(Number); console.log(a + b)',
    "bash": "read a b; echo $((a + b))",
}
PROGRAM_OF = {"c": "gcc", "cpp": "g++", "javascript": "node", "bash": "bash", "python": "python3"}
AMPLE = Limits(wall_s=60.0, memory_bytes=512 * 2**20)


@pytest.mark.parametrize(("code", "cases"), [(READS_AND_ADDS, SUMS), (ADD, ADDS), (IN_A_CLASS, ADDS)])
async def test_a_right_program_passes(pool: Pool, code: str, cases: list) -> None:
    verdict = await grade(code, cases, pool=pool)
    assert [case.outcome for case in verdict.cases] == [Outcome.PASSED] * 3
    assert (verdict.reward, verdict.partial_reward) == (1.0, 1.0)


@pytest.mark.parametrize(("code", "cases"), [("print(3)", SUMS), ("def add(a, b): return 3", ADDS)])
async def test_each_case_counts_for_its_part(pool: Pool, code: str, cases: list) -> None:
    verdict = await grade(code, cases, pool=pool)
    assert [case.outcome for case in verdict.cases] == [Outcome.WRONG, Outcome.PASSED, Outcome.WRONG]
    assert (verdict.reward, verdict.num_passed) == (0.0, 1)
    assert verdict.partial_reward == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=pytest.mark.slow if name == "cpp" else ()) for name in BY_LANGUAGE]
)
async def test_languages(jails: Pool, language: str) -> None:
    if shutil.which(PROGRAM_OF[language], path="/usr/bin:/bin") is None and language != "python":
        pytest.skip(f"{PROGRAM_OF[language]} is not installed")
    right = await grade(BY_LANGUAGE[language], SUMS, pool=jails, language=language, limits=AMPLE)
    wrong = await grade("(", SUMS, pool=jails, language=language, limits=AMPLE)
    assert right.reward == 1.0, right
    assert wrong.cases[0].outcome in (Outcome.CRASHED, Outcome.NOT_BUILT)
    assert wrong.cases[0].detail


async def test_calls_in_javascript(jails: Pool) -> None:
    if shutil.which("node", path="/usr/bin:/bin") is None:
        pytest.skip("node is not installed")
    code = "class Solution { add(a, b) { console.log('thinking'); return a + b } }"
    assert (await grade(code, ADDS, pool=jails, language="javascript", limits=AMPLE)).reward == 1.0
    assert (await grade("const add = (a, b) => a - b", ADDS, pool=jails, language="javascript")).reward == 0.0
    given = {"a": [1.5, "é", None, True], "b": 2**64}
    case = CallCase(function="f", args=[given["a"]], expected=given)
    assert (
        await grade("const f = (a) => ({a, b: 2n ** 64n})", [case], pool=jails, language="javascript")
    ).reward == 1.0


NOT_JSON = {
    "python": {"float('nan')": None, "[float('inf')]": [None], "{1}": [1], "{}.keys()": [], "b''": "", "f": None},
    "javascript": {
        **{"NaN": None, "[-Infinity]": [None], "undefined": None, "[,]": [None], "{a: undefined}": {}},
        **{"new Map()": {}, "[new Set([1])]": [{}], "new Date(NaN)": None, "Promise.resolve(1)": {}, "f": None},
    },
}


@pytest.mark.parametrize("language", NOT_JSON)
async def test_what_json_cannot_say_equals_nothing(jails: Pool, language: str) -> None:
    """Not even what is often written in its place."""
    if shutil.which(PROGRAM_OF[language], path="/usr/bin:/bin") is None and language != "python":
        pytest.skip(f"{PROGRAM_OF[language]} is not installed")
    values = f"[{', '.join(NOT_JSON[language])}][i]"
    code = f"def f(i): return {values}" if language == "python" else f"const f = (i) => {values}"
    expected = enumerate(NOT_JSON[language].values())
    cases = [CallCase(function="f", args=[index], expected=value) for index, value in expected]
    verdict = await grade(code, cases, pool=jails, language=language, limits=AMPLE)
    assert [case.outcome for case in verdict.cases] == [Outcome.WRONG] * len(cases), verdict


async def test_a_language_of_ones_own(pool: Pool) -> None:
    sed = Language(name="sed", file="main.sed", run=("sed", "-f", "main.sed"), smallest="s/.*/ok/")
    verdict = await grade("s/a/b/", [StdinCase(stdin="cat", expected="cbt")], pool=pool, language=sed)
    assert verdict.reward == 1.0


@pytest.mark.parametrize(
    ("code", "outcome", "limits"),
    [
        ("1/0", Outcome.CRASHED, None),
        ("def (", Outcome.CRASHED, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Outcome.CRASHED, None),
        ("while True: pass", Outcome.TIMEOUT, Limits(wall_s=0.2)),
        ("hoard = bytearray(2**30)", Outcome.MEMORY, None),
        ("print('x' * 100_000)", Outcome.OUTPUT_LIMIT, None),
    ],
)
async def test_how_it_fails_is_told(pool: Pool, code: str, outcome: Outcome, limits: Limits | None) -> None:
    verdict = await grade(code, SUMS[:1], pool=pool, limits=limits)
    assert (verdict.cases[0].outcome, verdict.reward) == (outcome, 0.0)


async def test_stop_early_leaves_out_what_follows(pool: Pool) -> None:
    cases = [StdinCase(stdin=str(n), expected="yes") for n in range(12)]
    verdict = await grade("print('no' if input() == '1' else 'yes')", cases, pool=pool, stop_early=True)
    outcomes = [case.outcome for case in verdict.cases]
    assert outcomes == [Outcome.PASSED, Outcome.WRONG, *[Outcome.SKIPPED] * 10]


async def test_a_case_may_have_limits_of_its_own(pool: Pool) -> None:
    cases = [StdinCase(stdin="", expected="", limits=Limits(wall_s=0.2)), StdinCase(stdin="1", expected="")]
    verdict = await grade("if not input.__call__ or not open(0).read():\n  while True: pass", cases, pool=pool)
    assert [case.outcome for case in verdict.cases] == [Outcome.TIMEOUT, Outcome.PASSED]


async def test_checkers_decide(pool: Pool) -> None:
    third = [StdinCase(stdin="", expected="0.333")]
    assert (await grade("print(1/3)", third, pool=pool)).reward == 0.0
    assert (await grade("print(1/3)", third, pool=pool, checker=CloseNumbers(absolute=1e-3))).reward == 1.0
    assert (await grade("print('0.333')", third, pool=pool, checker=Exact())).reward == 0.0  # a line end too many


async def test_a_custom_checker_decides(jails: Pool) -> None:
    divides = CustomChecker("def check(stdin, expected, output): return int(stdin) % int(output) == 0")
    cases = [StdinCase(stdin="12", expected="6")]
    assert (await grade("print(4)", cases, pool=jails, checker=divides)).reward == 1.0
    assert (await grade("print(5)", cases, pool=jails, checker=divides)).reward == 0.0
    assert (await grade("print('none')", cases, pool=jails, checker=divides)).reward == 0.0  # the checker fails on it


async def test_a_custom_checker_of_calls_may_give_a_part(jails: Pool) -> None:
    share = CustomChecker(
        "import json\ndef check(stdin, expected, output):\n    print('noise')\n"
        "    return len(set(json.loads(output)) & set(json.loads(expected))) / 4"
    )
    cases = [CallCase(function="some", args=[], expected=[1, 2, 3, 4])]
    verdict = await grade("def some(): return [1, 2, 3]", cases, pool=jails, checker=share)
    assert (verdict.reward, verdict.partial_reward) == (0.0, 0.75)


@pytest.mark.parametrize("score", ["float('nan')", "float('inf')", "2", "-1", "'1'", "[1]", "None", "1/0"])
async def test_a_checker_that_gives_no_score_passes_nothing(jails: Pool, score: str) -> None:
    checker = CustomChecker(f"def check(stdin, expected, output): return output == expected or {score}")
    verdict = await grade("print(1)", SUMS[:1], pool=jails, checker=checker)
    assert (verdict.reward, verdict.partial_reward) == (0.0, 0.0)


@pytest.mark.parametrize("body", ["1/0", "__import__('numpie')", "None", "2", "'yes'"])
async def test_a_checker_that_fails_on_an_expected_output_is_at_fault(jails: Pool, body: str) -> None:
    with pytest.raises(ValueError, match="no score for an expected output"):
        await grade("print(2)", SUMS[:1], pool=jails, checker=CustomChecker(f"def check(a, b, c): return {body}"))


def test_a_checker_that_evaluates_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ast\.literal_eval"):
        CustomChecker("def check(stdin, expected, output): return eval(output) == eval(expected)")


async def test_a_call_of_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        CallCase(function="f", args=[], expected={1, 2})


async def test_a_tuple_that_is_expected_counts_as_a_list(pool: Pool) -> None:
    case = CallCase(function="f", args=[], expected=({1: (2,)},))
    assert (await grade("def f(): return ({'1': (2,)},)", [case], pool=pool)).reward == 1.0


async def test_the_checker_is_in_another_sandbox(jails: Pool) -> None:
    code = "open('left.txt', 'w').write('seen')"
    checker = CustomChecker("import os\ndef check(stdin, expected, output): return not os.path.exists('left.txt')")
    assert (await grade(code, [StdinCase(stdin="", expected="")], pool=jails, checker=checker)).reward == 1.0


async def test_what_a_call_prints_is_no_result(pool: Pool) -> None:
    code = "print(2)\ndef add(a, b):\n    print(a + b)\n    return a + b"
    verdict = await grade(code, ADDS, pool=pool)
    assert (verdict.reward, verdict.cases[0].output, verdict.cases[0].detail) == (1.0, "2", "2\n2")


@pytest.mark.parametrize(
    ("cases", "language", "message"),
    [
        ([], "python", "cases is empty"),
        ([*SUMS, *ADDS], "python", "two kinds"),
        (ADDS, "bash", "no way to call a function"),
        (SUMS, "cobol", "language is 'cobol'"),
    ],
)
async def test_what_cannot_be_judged_is_refused(pool: Pool, cases: list, language: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await grade(ADD, cases, pool=pool, language=language)


async def test_what_holds_the_expected_outputs_is_refused_where_there_are_no_walls(pool: Pool) -> None:
    tests = UnitTests(files={"test_it.py": "from solution import add\ndef test_it(): assert add(1, 2) == 3"})
    with pytest.raises(SandboxError, match="need walls, but the subprocess backend gives only 'process'"):
        await grade(ADD, tests, pool=pool)
    checker = CustomChecker("def check(stdin, expected, output): return True")
    with pytest.raises(SandboxError, match="need walls"):
        await grade(READS_AND_ADDS, SUMS, pool=pool, checker=checker)


@pytest.mark.parametrize("source", ["def check(", "def chek(stdin, expected, output): return True"])
def test_a_checker_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="the checker"):
        CustomChecker(source)


@pytest.mark.parametrize("build", [None, ("no-such-compiler", "main.x")])
async def test_a_language_that_is_not_there_is_no_verdict(pool: Pool, build: tuple[str, ...] | None) -> None:
    absent = Language(name="absent", file="main.x", run=("no-such-program", "main.x"), smallest="ok", build=build)
    with pytest.raises(SandboxError, match="absent does not run in this sandbox"):
        await grade("anything", SUMS, pool=pool, language=absent)


async def test_a_sandbox_that_fails_is_no_verdict() -> None:
    async with open_pool(backend="subprocess") as pool:
        await pool.close()
        with pytest.raises(SandboxError):
            await grade(READS_AND_ADDS, SUMS, pool=pool)


OTHER_VERSION = b"\0\0\r\n"


@pytest.mark.parametrize("options", [{}, {"version": OTHER_VERSION}], ids=["same", "other"])
async def test_a_precompiled_text_does_what_its_source_does(box: Sandbox, options: dict[str, bytes]) -> None:
    text = precompiled('import sys\nprint(__name__, sys.stdin.read(), \'"""\\n{}\')\n1 / 0', "<mine>", **options)
    result = await box.exec_python(text, stdin=b"given")
    assert result.stdout == b'__main__ given """\n{}\n'
    assert b'File "<mine>", line 3' in result.stderr
    assert result.stderr.endswith(b"ZeroDivisionError: division by zero\n")


async def test_a_python_of_this_version_does_not_look_at_the_source(box: Sandbox) -> None:
    text = precompiled("print('as compiled')", "<mine>")
    assert (await box.exec_python(text.replace("print(", "1 / 0 (", 1))).stdout == b"as compiled\n"
