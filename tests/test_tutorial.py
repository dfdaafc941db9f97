"""docs/tutorial.md: its code is that of the template that it makes, and its commands work in their order, in an empty
folder (slow, with a short training of a small model).
"""

import re
from pathlib import Path

import pytest

from areal_agent.new import make
from tests.commands import ROOT, run

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)\n```", PAGE, re.DOTALL)
CODE = re.findall(r"```(?:python|yaml)\n(.*?)\n```", PAGE, re.DOTALL)
SHORT = [
    "steps=2",
    "rollout.max_tokens=4",
    "engine.max_context_tokens=512",
    "batch_size=2",
    "group_size=2",
    "eval.num_tasks=4",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All files that the page's first command makes."""
    folder = make("number_game", "multi_turn", tmp_path_factory.mktemp("tutorial"))
    return "\n".join(path.read_text() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("block", CODE, ids=[block.partition("\n")[0] for block in CODE])
def test_the_code_is_that_of_the_template(block: str, made: str) -> None:
    assert block in made


def said(command: str, folder: Path, *more: str) -> str:
    python, option, *args = command.split()
    assert (python, option) == ("python", "-m")
    done = run(*args, *more, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_commands_in_their_order(small_model: Path, tmp_path: Path) -> None:
    new, test, dry_run, train, verify = COMMANDS
    assert "made number_game/" in said(new, tmp_path)
    assert "passed" in said(test, tmp_path)
    assert "64 to train on, 64 held out" in said(dry_run, tmp_path)
    assert "success on 4 held-out tasks" in said(train, tmp_path, f"model={small_model}", *SHORT)
    assert verify.startswith("python -m areal_agent.ledger verify ")
    said(verify, tmp_path)
