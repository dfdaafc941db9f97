"""Every command: 1. answers --help; 2. refuses an unknown option with the nearest valid one, exit 2, no traceback;
3. prints a config fault as one line, exit 2."""

import subprocess
import sys

import pytest

from areal_agent.command import nearest

COMMANDS = [
    "areal_agent.train",
    "areal_agent.eval",
    "areal_agent.engine",
    "areal_agent.ledger",
    "areal_agent.models.tiny",
]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"python -m {command}" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["areal_agent.train", "--confg", "x"], "unknown option '--confg'; did you mean '--config'?"),
        (["areal_agent.train", "--config", "x", "--dry"], "unknown option '--dry'; did you mean '--dry-run'?"),
        (["areal_agent.engine", "--model", "x", "--prot", "1"], "unknown option '--prot'; did you mean '--port'?"),
        (["areal_agent.train"], "give --config FILE, or --resume RUN_DIR"),
        (["areal_agent.train", "--config", "none.yaml"], "cannot read the config 'none.yaml'"),
        (["areal_agent.train", "--config", "configs/quickstart.yaml", "model=none"], "model 'none': there is no such"),
        (["areal_agent.train", "--resume", "none"], "there is no run folder 'none'"),
        (["areal_agent.ledger", "verify", "none"], "none"),
    ],
)
def test_faults_are_one_line_and_exit_2(args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_nearest() -> None:
    assert nearest("stepz", ["steps", "seed"]) == "did you mean 'steps'?"
    assert nearest("q", ["b", "a"]) == "valid: a, b"
