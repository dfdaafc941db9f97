"""The package outside a clone: a wheel, installed into an environment of its own, in a folder elsewhere.

1. Every package that is imported is declared, and the extra `all` has those that users may want. 2. The wheel has every
file of the packages and nothing else, and `areal_agent.__version__` is its version. 3. From there, with nothing of the
clone on the path: the packages are its own, beside a user's `envs`; a model trains; the doctor names an `envs` that
hides ours; `areal_agent.new` makes one that passes its tests (test_tutorial.py trains one). The Python environment
borrows the dependencies of the one that runs the tests (slow), or pip installs them all (full).
"""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import areal_agent

ROOT = Path(__file__).parents[1]
PACKAGES = ("areal_agent", "envs", "sandboxes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"all", "dev", "docs", "test"}
LIBRARIES = {
    "browser",
    "gymnasium",
    "inspect-ai",
    "mcp",
    "reasoning-gym",
    "textarena",
}  # of tasks and tools: each brings much along


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(one).name) for one in requirements}


def imported() -> Iterator[tuple[str, Path]]:
    """The packages that files import, but for those that run in containers, and templates, which say what they need."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if {"folders", "templates"} & set(path.parts):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from ((alias.name.split(".")[0], path) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    yield node.module.split(".")[0], path


def test_what_is_imported_is_declared() -> None:
    declared = names(PROJECT["dependencies"]) | {name for extra in EXTRAS.values() for name in names(extra)}
    elsewhere = {"sglang", "vllm", "flash_attn"}  # in environments of their own, or used where they are
    known = packages_distributions() | {"mlflow": ["mlflow-skinny"], "pydantic_core": ["pydantic"]}
    missing = {
        f"{name} in {path.relative_to(ROOT)}"
        for name, path in imported()
        if name not in {*sys.stdlib_module_names, *PACKAGES, *elsewhere}
        if not {canonicalize_name(one) for one in known.get(name, [name])} & declared
    }
    assert not missing


def test_the_extra_all_has_what_users_may_want() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == set(EXTRAS) - FOR_DEVELOPERS - LIBRARIES


def pip(*args: str | Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, args)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel, where building leaves nothing in the clone and finds nothing of an earlier build."""
    folder = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "-w", folder, source)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_has_every_file_and_nothing_else(source: Path, wheel: Path) -> None:
    files = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {path for package in PACKAGES for path in (source / package).rglob("*") if path.is_file()}
    assert files == {path.relative_to(source).as_posix() for path in expected}
    assert wheel.name.split("-")[1] == areal_agent.__version__


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("borrowed", marks=pytest.mark.slow),
        pytest.param("fresh", marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and its dependencies, installed or borrowed, and not the clone."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    if request.param == "fresh":
        pip("--python", python, "install", "-q", "-c", ROOT / "constraints.txt", wheel, "pytest-asyncio")
    else:
        pip("--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "borrowed.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files count for nothing
    return python


class Elsewhere:
    """A user's folder, in which commands are run."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self._python = python

    def run(self, *args: str, exit_code: int = 0) -> str:
        """Run `python ARGS` there; return what it prints."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(self._python), *args]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def elsewhere(tmp_path: Path, python: Path) -> Elsewhere:
    return Elsewhere(tmp_path, python)


WORKFLOW = """
async def solve(task, rollout):
    question = {"role": "user", "content": task["question"]}
    reply = await rollout.client.chat.completions.create(model=rollout.model, messages=[question])
    return float(len(reply.choices[0].message.content or "") % 2)
"""
SMALL = {
    "steps": 2,
    "batch_size": 2,
    "group_size": 2,
    "eval": {"num_tasks": 0},
    "rollout": {"max_tokens": 8},
    "engine": {"max_context_tokens": 256},
    "run_dir": "run",
}


def test_a_model_trains_beside_a_users_own_envs(elsewhere: Elsewhere, small_model: Path) -> None:
    folder = elsewhere.folder
    (folder / "envs").mkdir()
    (folder / "envs" / "mine.py").write_text(WORKFLOW)
    (folder / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n' * 8)
    values = {"model": str(small_model), "workflow": "envs.mine:solve", "tasks": "tasks.jsonl", **SMALL}
    (folder / "mine.yaml").write_text(yaml.safe_dump(values))
    where = "import areal_agent, envs.calculator as ours, envs.mine, sandboxes as theirs; "
    found = elsewhere.run("-c", where + "print(*(one.__file__ for one in (areal_agent, ours, theirs)), sep='\\n')")
    assert not [path for path in found.splitlines() if Path(path).is_relative_to(ROOT)]
    assert f"areal_agent {areal_agent.__version__}" in elsewhere.run("-m", "areal_agent")
    examined = elsewhere.run("-m", "areal_agent.doctor", "--config", "mine.yaml", "--no-engine")
    assert "ok    packages" in examined
    elsewhere.run("-m", "areal_agent.train", "--config", "mine.yaml")
    assert (folder / "run" / "checkpoints" / "step_000002" / "model.safetensors").is_file()
    elsewhere.run("-m", "areal_agent.ledger", "verify", "run")
    (folder / "envs" / "__init__.py").touch()
    examined = elsewhere.run("-m", "areal_agent.doctor", "--config", "mine.yaml", "--no-engine", exit_code=1)
    assert f"fail  packages      `import envs` finds {folder / 'envs'}, which hides" in examined


def test_a_new_environment_passes_its_tests(elsewhere: Elsewhere) -> None:
    (elsewhere.folder / "envs").mkdir()
    (elsewhere.folder / "envs" / "mine.py").write_text(WORKFLOW)
    elsewhere.run("-m", "areal_agent.new", "my_game")
    assert " passed" in elsewhere.run("-m", "pytest", "my_game")
