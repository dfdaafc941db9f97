"""Records of published data sets.

1. A LiveCodeBench record of texts, with private tests as pickles and as JSON, and one of calls, become cases; 2. so do
APPS and TACO records, whose results may stand in lists of one; 3. a pickle that would run code is refused, and so is
one that is damaged, or unfolds without end; 4. what is missing or of another type is named; 5. an answer stands behind
what its site has imported; 6. an answer to HumanEval may go on where the prompt ends, or be whole, and is judged where
it is not.
"""

import base64
import json
import os
import pickle
import zlib
from typing import Any

import pytest

from envs.code.records import from_apps, from_humaneval, from_livecodebench, load_plain
from sandboxes import Pool
from sandboxes.judge import CallCase, StdinCase, UnitTests, grade

SUM = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
CALL = {"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}


def packed(tests: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def livecodebench(**changes: Any) -> dict[str, Any]:
    record = {
        "question_id": "abc_a",
        "question_content": "Add two numbers.",
        "public_test_cases": json.dumps([SUM]),
        "private_test_cases": packed([SUM, SUM]),
        "metadata": "{}",
        "starter_code": "",
    }
    return record | changes


def apps(inputs: Any, outputs: Any, fn_name: str | None = None) -> dict[str, Any]:
    tests = {"inputs": inputs, "outputs": outputs} | ({"fn_name": fn_name} if fn_name else {})
    return {"problem_id": 7, "question": "Add.", "input_output": json.dumps(tests)}


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "entry_point": "twice",
    "prompt": "def helper(x):\n    return x + x\n\ndef twice(x: int) -> int:\n    '''Doubles x.'''\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == helper(3)\n",
}


@pytest.mark.parametrize("private", [packed([SUM, SUM]), json.dumps([SUM, SUM])])
def test_livecodebench_texts(private: str) -> None:
    problem = from_livecodebench(livecodebench(private_test_cases=private))
    assert problem.cases == [StdinCase(stdin="1 2\n", expected="3\n")] * 3
    assert (problem.id, problem.prompt) == ("abc_a", "Add two numbers.")


def test_livecodebench_calls() -> None:
    record = livecodebench(
        metadata='{"func_name": "append"}', public_test_cases=json.dumps([CALL]), private_test_cases=packed([])
    )
    assert from_livecodebench(record).cases == [CallCase(function="append", args=[[1, 2], 3], expected=[1, 2, 3])]


@pytest.mark.parametrize(("given", "expected"), [("1\n2", "3"), (["1", "2"], ["3"])])
def test_apps_texts(given: Any, expected: Any) -> None:
    assert from_apps(apps([given], [expected])).cases == [StdinCase(stdin="1\n2", expected="3")]


@pytest.mark.parametrize(
    ("outputs", "expected"), [([[3], [5]], [3, 5]), ([3, 5], [3, 5]), ([[3], [5, 6]], [[3], [5, 6]])]
)
def test_apps_calls(outputs: list[Any], expected: list[Any]) -> None:
    cases = from_apps(apps([[1, 2], [2, 3]], outputs, "add")).cases
    assert [(case.args, case.expected) for case in cases] == [([1, 2], expected[0]), ([2, 3], expected[1])]


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch stolen",)


@pytest.mark.parametrize("data", [RunsCode(), os.path.join, {1, RunsCode}, pytest])
def test_a_pickle_that_needs_names_is_refused(data: Any) -> None:
    try:
        pickled = pickle.dumps(data)
    except TypeError:
        pickled = b"cos\nsystem\n(S'true'\ntR."
    private = base64.b64encode(zlib.compress(pickled)).decode()
    with pytest.raises(ValueError, match=r"cannot be unpacked.*only plain data is read"):
        from_livecodebench(livecodebench(private_test_cases=private))


def test_a_pickle_that_unfolds_without_end_is_refused_in_short() -> None:
    """Each list holds the one before twice: as text, this would have 2**40 items."""
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb, bomb]
    private = base64.b64encode(zlib.compress(pickle.dumps([bomb]))).decode()
    with pytest.raises(ValueError, match="needs the texts 'input' and 'output'") as found:
        from_livecodebench(livecodebench(private_test_cases=private))
    assert len(str(found.value)) < 500


@pytest.mark.parametrize("pickled", [b"", b"garbage", b"\x80\x04]", b"Pid\n.", b"("])
def test_a_damaged_pickle_is_refused(pickled: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_plain(pickled)


@pytest.mark.parametrize("numbered", [b"p268435455\n.", b"r\xff\xff\xff\x0f."])
def test_a_pickle_that_would_take_gigabytes_is_refused(numbered: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="it numbers more objects than it has bytes"):
        load_plain(b"K\x01" + numbered)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (livecodebench(private_test_cases="%%%"), "'private_test_cases' cannot be unpacked"),
        (livecodebench(private_test_cases=None), "'private_test_cases' is None; it must be a str"),
        (livecodebench(private_test_cases='{"a": 1}'), "'private_test_cases'"),
        (livecodebench(public_test_cases="["), "'public_test_cases' is not JSON"),
        (livecodebench(public_test_cases='[{"input": 1}]'), "needs the texts 'input' and 'output'"),
        (livecodebench(question_id=None), "'question_id'"),
        (livecodebench(metadata="[]"), "'metadata'"),
        (livecodebench(metadata='{"func_name": "f"}'), "a test of f is not JSON"),
    ],
)
def test_what_is_wrong_with_a_record_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_livecodebench(record)


@pytest.mark.parametrize(
    "record",
    [apps(["1"], []), apps([], []), apps("1", "1"), apps([1], ["1"]), apps([1], [1], "f"), apps([[1]], [1], "a.b")],
)
def test_an_apps_record_of_another_shape_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_apps(record)


@pytest.mark.parametrize("changes", [{"prompt": "def ("}, {"test": "def ("}, {"entry_point": "a b"}, {"task_id": 0}])
def test_a_humaneval_record_of_another_shape_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_humaneval(HUMANEVAL | changes)


async def test_an_answer_finds_the_usual_names(pool: Pool) -> None:
    problem = from_apps(apps([[[3, 1, 2]]], [[[[1, 2, 3], 3]]], "order"))
    answer = (
        "from __future__ import annotations\nclass Solution:\n    def order(self, xs: List[int]):\n"
        "        heapify(xs)\n        return [[heappop(xs) for _ in range(3)], pow(3, 1, 5)]"
    )
    assert (await grade(problem.complete(answer), problem.cases, pool=pool)).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("    return 2 * x", 1.0),
        ("    return helper(x)", 1.0),
        ("def twice(x):\n    return x * 2", 1.0),
        ("    return 4", 0.0),
        ("    pass", 0.0),
    ],
)
async def test_humaneval_answers(jails: Pool, answer: str, reward: float) -> None:
    problem = from_humaneval(HUMANEVAL)
    assert isinstance(problem.cases, UnitTests)
    assert (await grade(problem.complete(answer), problem.cases, pool=jails)).reward == reward
