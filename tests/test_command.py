"""Every command: 1. answers --help; 2. refuses an unknown option with the nearest valid one, exit 2, no traceback;
3. prints a config fault as one line, exit 2; 4. what loads slowly is not loaded before a command line is read; 5. the
package itself lists them all. 6. A long one goes on when its output has lost its reader or its terminal."""

import importlib.util
import os
import pty
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import areal_agent
from areal_agent.command import nearest

COMMANDS = [
    "areal_agent",
    "areal_agent.new",
    "areal_agent.train",
    "areal_agent.eval",
    "areal_agent.sft",
    "areal_agent.doctor",
    "areal_agent.plan",
    "areal_agent.view",
    "areal_agent.episode",
    "areal_agent.engine",
    "areal_agent.gateway",
    "areal_agent.ledger",
    "areal_agent.models.tiny",
    "areal_agent.config_reference",
    "areal_agent.engine.environment",
]


def run_here(monkeypatch: pytest.MonkeyPatch, command: str, *args: str) -> object:
    """`python -m COMMAND ARGS` in this process, which has loaded already what takes seconds; the exit code."""
    monkeypatch.setattr(sys, "argv", [command, *args])
    spec = importlib.util.find_spec(command)
    assert spec is not None
    running = f"{command}.__main__" if spec.submodule_search_locations else command
    monkeypatch.delitem(sys.modules, running, raising=False)  # runpy warns of a module that is there already
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    return ended.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(monkeypatch, command, "--help") == 0
    assert f"python -m {command}" in capsys.readouterr().out


def test_help_of_a_real_process() -> None:
    command = [sys.executable, "-m", "areal_agent.train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m areal_agent.train" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["areal_agent.train", "--confg", "x"], "unknown option '--confg'; did you mean '--config'?"),
        (["areal_agent.train", "--config", "x", "--dry"], "unknown option '--dry'; did you mean '--dry-run'?"),
        (["areal_agent.engine", "--model", "x", "--prot", "1"], "unknown option '--prot'; did you mean '--port'?"),
        (["areal_agent.engine", "--modle", "x"], "unknown option '--modle'; did you mean '--model'?"),
        (["areal_agent.gateway", "--engin=x"], "unknown option '--engin'; did you mean '--engine'?"),
        (["areal_agent.plan", "--config", "x", "--gpu", "2"], "unknown option '--gpu'; did you mean '--gpus'?"),
        (["areal_agent.train", "--dry-run", "a.yaml"], "did you mean --config a.yaml?"),
        (["areal_agent.train"], "give --config FILE, or --resume RUN_DIR"),
        (["areal_agent.train", "--config", "none.yaml"], "cannot read the config 'none.yaml'"),
        (["areal_agent.train", "--config", "configs/quickstart.yaml", "model=none"], "model 'none': there is no such"),
        (["areal_agent.train", "--resume", "none"], "there is no run folder 'none'"),
        (["areal_agent.ledger", "verify", "none"], "none"),
        (["examples.minimal_loop", "--nope"], "unknown option '--nope'"),
        (["examples.minimal_loop", "stps=3"], "unknown key 'stps'; did you mean 'steps'?"),
        (["areal_agent.engine.environment", "sgalng", "x"], "no engine 'sgalng'"),
        (["areal_agent.new", "my-game"], "NAME is 'my-game', not a Python identifier"),
        (["areal_agent.new", "class"], "NAME is 'class', a word of the language"),
        (["areal_agent.new", "configs"], "'configs' exists already; remove it, or choose another name"),
        (["areal_agent.new", "json"], "'json' belongs to a module that is installed here; choose another name"),
        (["areal_agent.new", "my_game", "--template", "tool"], "no such template; did you mean 'tools'?"),
        (["areal_agent", "trian"], "there is no command 'trian'; did you mean 'train'?"),
        (["areal_agent", "eval", "--config", "x"], "python -m areal_agent.eval --help"),
    ],
)
def test_faults_are_one_line_and_exit_2(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, *args) == 2
    fault, *hints = capsys.readouterr().err.splitlines()
    assert message in fault and all(line.startswith("try: ") for line in hints)


@pytest.mark.parametrize("command", ["train", "eval", "doctor.__main__"])
def test_a_command_line_is_read_before_anything_slow_is_loaded(command: str) -> None:
    code = (
        f"import sys, areal_agent.{command} as command\n"
        "sys.argv = ['command', '--help']\n"
        "try:\n    command.main()\nexcept SystemExit:\n    pass\n"
        "slow = {'torch', 'transformers', 'openai', 'aiohttp', 'pydantic'}\n"
        "print('loaded:', sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


STARTED_BY_A_RUN = {"areal_agent.trainer", "areal_agent.rollout.worker"}


def test_the_package_lists_all_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(areal_agent.__file__).parent
    runnable = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__main__")
        for path in folder.rglob("*.py")
        if "    run_command(main" in path.read_text() and "__main__" in path.read_text()
    }
    assert run_here(monkeypatch, "areal_agent") == 0
    listed = set(re.findall(r"python -m (areal_agent\S+)", capsys.readouterr().out))
    assert listed == runnable - STARTED_BY_A_RUN - {"areal_agent"}


def test_nearest() -> None:
    assert nearest("stepz", ["steps", "seed"]) == "did you mean 'steps'?"
    assert nearest("q", ["b", "a"]) == "valid: a, b"


def test_a_long_one_is_unbuffered_where_that_is_wanted() -> None:
    code = "import os\nfrom areal_agent.command import run_command\n"
    code += "run_command(lambda: [print('said'), os._exit(0)], outlives_readers=True)"
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONUNBUFFERED": value}, capture_output=True, check=True
        ).stdout
        for value in ("1", "")
    ]
    assert said == [b"said\n", b""]


LONG = """
import sys, time
from pathlib import Path
from areal_agent.command import run_command

def main():
    print("begun", flush=True)
    sys.stdin.read()
    for stream in (sys.stdout, sys.stderr, sys.stdout):
        print("later", file=stream, flush=True)
    Path(sys.argv[1]).write_text("saved")
    return 7

run_command(main, outlives_readers=True)
"""


@pytest.mark.parametrize("open_ends", [os.pipe, pty.openpty])
def test_a_long_one_outlives_its_reader(open_ends: Callable[[], tuple[int, int]], tmp_path: Path) -> None:
    reader, writer = open_ends()
    command = [sys.executable, "-c", LONG, str(tmp_path / "file")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writer, stderr=writer)
    os.close(writer)
    assert os.read(reader, 100).strip() == b"begun"
    os.close(reader)
    process.communicate(timeout=60)
    assert (process.returncode, (tmp_path / "file").read_text()) == (7, "saved")
