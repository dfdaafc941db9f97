"""Programming contests: LiveCodeBench, CodeContests and Codeforces, by the fields that their data sets have on the hub.

    a row ─▶ checked, with its tests decoded once ─▶ a task ─▶ one answer ─▶ its program on every test, in sandboxes

A task keeps its tests as the row has them, for those of LiveCodeBench are large. Tests are texts in and out, or calls
of a method. A problem that these cannot judge (it reads files, or talks to its judge) is left out.
"""

import ast
import base64
import json
import logging
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from areal_agent import ConfigError, Rollout
from areal_agent.rollout.config import SourceConfig
from areal_agent.rollout.tasks import open_rows
from envs.code.conversation import asked_for_code
from envs.code.judging import open_sandboxes
from envs.code.records import load_plain
from sandboxes import Pool
from sandboxes.judge import CallCase, CloseNumbers, CustomChecker, StdinCase, Verdict, grade

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

MAX_TESTS_BYTES = 2**30  # of one problem
MODULES = (
    *("typing", "collections", "heapq", "bisect", "itertools", "functools", "math", "operator", "string"),
    *("re", "random", "copy", "datetime", "json", "sys"),
)
IMPORTS = f"""
def _import_all():
    import builtins, importlib
    for module in map(importlib.import_module, {MODULES}):
        names = getattr(module, "__all__", [name for name in dir(module) if name[0] != "_"])
        vars(builtins).update({{name: getattr(module, name) for name in names if not hasattr(builtins, name)}})
    vars(builtins).update({{name: importlib.import_module(name) for name in {MODULES}}})
_import_all()
"""
"""What solutions of LeetCode's problems may use without an import. Globals would hide methods of the same name."""
HOW_STDIN = "Write a Python program that reads standard input and prints the answer."
HOW_CALL = "Complete this code in Python:\n\n```python\n{}\n```"
HOW = "Answer with the whole program in one block of code."
CLOSE = CloseNumbers()
CHECKER = """
import subprocess, sys, tempfile
from pathlib import Path

def check(stdin, expected, output):
    names = ("checker.py", "input.txt", "correct_output.txt", "solution_output.txt")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for name, text in zip(names, ({source!r}, stdin, expected, output)):
            Path(folder, name).write_text(text)
        done = subprocess.run([sys.executable, *names], cwd=folder, capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.split()[-1:] == ["1"]
"""
"""Runs a checker of Codeforces' data set, which takes three files and prints 1 or 0."""


# ------------------------------------------------------------------------------------------------- loaders


def livecodebench(
    split: str,
    seed: int,
    source: str = "lighteval/code_generation_lite",
    name: str = "v6",
    since: str = "",
    until: str = "9999",
) -> list[dict[str, Any]]:
    """Return the problems of LiveCodeBench (Jain et al. 2024, arXiv 2403.07974) of contests in `[since, until)`.

    `source` is a data set on the hub with the subset `name`, or a file. Raises ConfigError that names a bad row.
    """

    def task(row: Row) -> dict[str, Any] | None:
        made = {
            "id": _text(row, "question_id"),
            "question": _text(row, "question_content"),
            "starter": _text(row, "starter_code"),
            "function": json.loads(_text(row, "metadata")).get("func_name"),
            "tests": [_text(row, "public_test_cases"), _text(row, "private_test_cases")],
            "tags": [_text(row, "platform"), _text(row, "difficulty")],
        }
        _cases(made)
        return made if since <= str(row["contest_date"]) < until else None

    return _tasks(source, {"name": name}, task)


def codecontests(split: str, seed: int, source: str = "deepmind/code_contests") -> list[dict[str, Any]]:
    """Return the test problems of CodeContests (Li et al. 2022, arXiv 2203.07814), or a file's. Raises ConfigError."""

    def task(row: Row) -> dict[str, Any] | None:
        tests: list[list[str]] = []
        for kind in ("public_tests", "private_tests", "generated_tests"):
            pairs = zip(row[kind]["input"], row[kind]["output"], strict=True)
            tests += [_pair({"input": given, "output": wanted}) for given, wanted in pairs]
        made = {"id": _text(row, "name"), "question": _text(row, "description"), "tests": tests}
        return made if tests and not row.get("input_file") and not row.get("output_file") else None

    return _tasks(source, {}, task)


def codeforces(
    split: str, seed: int, source: str = "open-r1/codeforces", name: str = "verifiable"
) -> list[dict[str, Any]]:
    """Return the test problems of Codeforces (Penedo et al. 2025, open-r1), or a file's. Raises ConfigError."""

    def task(row: Row) -> dict[str, Any] | None:
        parts = [_text(row, "title"), _text(row, "description")]
        for title, key in (("Input", "input_format"), ("Output", "output_format"), ("Note", "note")):
            parts += [f"{title}\n\n{row[key]}"] if row.get(key) else []
        parts += [f"Example\n\n{one['input']}\n\n{one['output']}" for one in row.get("examples") or ()]
        checker = row.get("generated_checker")
        made = {
            "id": _text(row, "id"),
            "question": "\n\n".join(parts),
            "tests": [_pair(one) for one in row["official_tests"] or ()],
            "checker": checker,
        }
        is_told = _text(row, "input_mode") == "stdio" and not row.get("interaction_format")
        return made if is_told and made["tests"] and not (checker and _may_evaluate(checker)) else None

    return _tasks(source, {"name": name}, task)


def _tasks(source: str, args: dict[str, str], task: Callable[[Row], dict[str, Any] | None]) -> list[dict[str, Any]]:
    is_here = Path(source).exists()
    rows = open_rows(SourceConfig(source=source, args={} if is_here else {**args}), "test", 0, "eval.tasks.args.source")
    tasks: list[dict[str, Any]] = []
    num_left_out = 0
    for place, row in rows:
        try:
            made = task(cast(Row, row))
        except KeyError as error:
            raise ConfigError(f"{place} has no field {error.args[0]!r}: {row!r:.200}") from None
        except (TypeError, ValueError, AttributeError, RecursionError, pickle.UnpicklingError, zlib.error) as error:
            raise ConfigError(f"{place} cannot be read ({error}): {row!r:.200}") from None
        tasks += [made] if made else []
        num_left_out += made is None
    if num_left_out:
        logger.info("%s: %d problems are left out, %d are judged", source, num_left_out, len(tasks))
    return tasks


def _text(row: Row, name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f"its field {name!r} is {row[name]!r:.50}, not a text")
    return row[name]


def _pair(test: Row) -> list[str]:
    return [_text(test, "input"), _text(test, "output")]


def _may_evaluate(checker: str) -> bool:
    """Return whether a checker might run what a program prints, which could then say that it is right."""
    return any(isinstance(node, ast.Name) and node.id in ("eval", "exec") for node in ast.walk(ast.parse(checker)))


# --------------------------------------------------------------------------------------------------- tests


def _cases(task: Row) -> list[StdinCase] | list[CallCase]:
    """Return the cases of a task. Raises ValueError for tests that are none."""
    tests: list[list[str]] = task["tests"]
    if "starter" in task:
        tests = [_pair(test) for text in task["tests"] for test in _decoded(text)]
    if name := task.get("function"):  # a line for each argument
        calls = [([json.loads(line) for line in given.splitlines()], json.loads(wanted)) for given, wanted in tests]
        return [CallCase(function=name, args=args, expected=expected) for args, expected in calls]
    return [StdinCase(stdin=given, expected=wanted) for given, wanted in tests]


def _decoded(text: str) -> list[Any]:
    """Read tests: JSON, or the base64 of the zlib of a pickle of that text. A pickle that is more is refused."""
    if not text.lstrip().startswith("["):
        packed = base64.b64decode(text, validate=True)
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, MAX_TESTS_BYTES)
        if not unpacking.eof:
            raise ValueError(f"its tests end too early, or are longer than {MAX_TESTS_BYTES} bytes")
        loaded: object = load_plain(data)
        if not isinstance(loaded, str):
            raise ValueError(f"its tests are a pickle of a {type(loaded).__name__}, not of a text")
        text = loaded
    return list(json.loads(text))


# ------------------------------------------------------------------------------------------------- workflow


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the program passes every test, else 0.0."""
    pool = await rollout.shared(open_sandboxes)
    starter = task.get("starter")
    how = HOW_CALL.format(starter) if starter else HOW_STDIN
    code = await asked_for_code(rollout, f"{task['question']}\n\n{how}\n{HOW}")
    return 0.0 if code is None else (await judged(code, task, pool)).reward


async def judged(code: str, task: Row, pool: Pool) -> Verdict:
    """Judge a program until its first failure."""
    program = f"{IMPORTS}\n{code}" if task.get("function") else code
    source = task.get("checker")
    checker = CustomChecker(CHECKER.format(source=source)) if source else CLOSE
    return await grade(program, _cases(task), pool=pool, checker=checker, stop_early=True)
