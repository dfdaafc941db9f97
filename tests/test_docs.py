"""Pages agree with the code:

1. configuration.md lists what the sections say; 2. reliability.md names tests that exist, and says which of them
`pytest` leaves out by default (slow); 3. Python in a page compiles, and what it imports from us and finds on `rollout`
exists; 4. commands in a page have these options, keys and config files; 5. README's environment trains, by README's own
command (slow); 6. the code of testing.md runs. `mkdocs build` checks links (.ci/run).
"""

import ast
import contextlib
import importlib
import inspect
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from areal_agent import Rollout
from areal_agent.config_reference import reference
from tests.commands import run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("*.md", "docs/*.md", "sandboxes/**/*.md", "envs/*/README.md", "examples/*/README.md")
PAGES = [path for folder in FOLDERS for path in sorted(ROOT.glob(folder)) if path.name != "CHANGELOG.md"]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`( \(slow\))?", (DOCS / "reliability.md").read_text())
SLOW = "pytest.mark.slow"
OURS = ("areal_agent", "sandboxes", "envs", "examples")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m ((?:areal_agent|sandboxes)[\w.]*)((?:[^`\n])*)")
KEYS = set(re.findall(r"^\| `([\w.]+)` \|", reference(), re.MULTILINE))
TAKE_KEYS = ("areal_agent.train", "areal_agent.eval", "areal_agent.sft", "areal_agent.doctor", "areal_agent.plan")
pages = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def test_the_page_is_up_to_date() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert page == reference(), "python -m areal_agent.config_reference > docs/configuration.md"


def test_every_row_names_a_test() -> None:
    rows = [line for line in (DOCS / "reliability.md").read_text().splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith("| fault |")]
    assert len(faults) == len(NAMED) > 0


@pytest.mark.parametrize(("path", "name", "mark"), NAMED)
def test_it_exists_and_is_slow_where_it_says_so(path: str, name: str, mark: str) -> None:
    statements = ast.parse((ROOT / path).read_text()).body
    tests = [one for one in statements if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name]
    assert len(tests) == 1, f"{path} has no {name}"
    marks = [ast.unparse(decorator) for decorator in tests[0].decorator_list]
    of_all = [ast.unparse(one) for one in statements if isinstance(one, ast.Assign)]
    is_slow = SLOW in marks or any(one.startswith("pytestmark") and SLOW in one for one in of_all)
    assert is_slow == bool(mark)


@pages
def test_its_python_compiles_and_what_it_uses_of_us_exists(page: Path) -> None:
    for code in PYTHON.findall(page.read_text()):
        tree = compile(code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
                module = importlib.import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rollout":
                assert node.attr in _names_of_a_rollout(), f"rollout.{node.attr}"


def _names_of_a_rollout() -> set[str]:
    return {*dir(Rollout), *inspect.signature(Rollout.__init__).parameters}


def test_the_page_of_test_tools_runs() -> None:
    names = {"__name__": "page"}  # one block goes on where the one before ended
    for code in PYTHON.findall((DOCS / "testing.md").read_text()):
        exec(compile(code, "docs/testing.md", "exec"), names)


@pages
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_its_commands_exist_as_written(page: Path) -> None:
    for module, options, keys in _commands(page.read_text()):
        text = help_of(module)
        assert [option for option in options if option not in re.findall(r"--[\w-]+", text)] == [], module
        assert [key for key in keys if key not in KEYS] == [], module


@pages
def test_config_files_that_it_names_exist(page: Path) -> None:
    named = re.findall(r"\b(?:configs|examples/\w+)/[\w.]+\.yaml\b", page.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.slow
def test_the_environment_of_readme_trains(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "my_env.py").write_text(next(code for code in PYTHON.findall(readme) if "def load(" in code))
    command = next(line for line in readme.splitlines() if "workflow=my_env:solve" in line)
    words = shlex.split(command.split("python -m ", 1)[1])
    shorter = ["steps=2", "eval.num_tasks=8", f"run_dir={tmp_path / 'run'}"]
    words = [word for word in words if not word.startswith(("steps=", "run_dir="))] + shorter
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    done = run(*words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


def _commands(page: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the module of each command in a page (with its subcommand), the options and the keys that it is given."""
    for module, rest in COMMAND.findall(page.replace("\\\n", " ")):
        words = shlex.split(re.split(r"\s#|[;|>)]", rest)[0].replace("'", ""))
        if module == "sandboxes" and words and words[0].isalpha():
            module = f"sandboxes {words[0]}"
        options = [word.split("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)]
        keys = [word.split("=")[0] for word in words if re.match(r"[a-z][\w.]*=", word)]
        yield module, options, keys if module in TAKE_KEYS else []


@cache
def help_of(command: str) -> str:
    """Return the `--help` of a command, run in this process."""
    module, *subcommand = command.split()
    output, argv = io.StringIO(), sys.argv
    sys.argv = [module, *subcommand, "--help"]
    try:
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = argv
    assert not end.value.code, command
    return output.getvalue()
