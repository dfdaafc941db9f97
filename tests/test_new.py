"""`python -m areal_agent.new`: folders that run at once.

1. Every template makes one, with the config of its name and no placeholder left; 2. its config passes every check of a
run; 3. its tests pass, run by pytest from outside the project; 4. what is in the way is left as it was. test_command.py
has bad names.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.new import TEMPLATES, make
from areal_agent.run.preflight import Preflight
from tests.commands import run

NEEDED = {"openai_agents": "agents", "langgraph": "langgraph"}
"""The package that a template's workflow imports and that may not be installed."""
# Asked before any test: tests/cluster leaves a module `agents` of its own.
USABLE = [name for name in TEMPLATES if name not in NEEDED or importlib.util.find_spec(NEEDED[name])]
FILES = {"README.md", "__init__.py", "demonstrations.py", "tasks.py", "test_workflow.py", "workflow.py"}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of each template."""
    parent = tmp_path_factory.mktemp("new")
    for template in TEMPLATES:
        make(f"my_{template}", template, parent)
    return parent


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_folder_is_whole(parent: Path, template: str) -> None:
    folder = parent / f"my_{template}"
    assert {path.name for path in folder.iterdir()} == FILES | {f"my_{template}.yaml"}
    assert not [path.name for path in folder.iterdir() if re.search(r"\{name\}|envs\.", path.read_text())]


@pytest.mark.parametrize("template", USABLE)
def test_the_config_passes_every_check(parent: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(parent)
    monkeypatch.chdir(parent)
    config = Config.load(f"my_{template}/my_{template}.yaml")
    assert "to train on, 64 held out" in Preflight.check(config).summary()


@pytest.mark.slow
def test_the_tests_pass(parent: Path) -> None:
    done = run("pytest", "-p", "no:cacheprovider", *(f"my_{name}" for name in USABLE), folder=parent)
    assert done.returncode == 0, done.stdout
    assert all(f"my_{name}/test_workflow.py" in done.stdout for name in USABLE)


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists already; remove it, or choose another name"):
        make("mine", "single", tmp_path)
    with pytest.raises(ConfigError, match="cannot make '/proc/mine_too'"):
        make("mine_too", "single", Path("/proc"))
    with pytest.raises(ConfigError, match=r"cannot make '.*xxx': File name too long"):
        make("x" * 300, "single", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]
