"""The shipped configs, run as a user runs them (slow).

1. The quickstart learns, and says so in summary.json. 2. The exported checkpoint, graded again, gives the same figure,
and loads with transformers. 3. The ledger proves the run, and its training comes out bit for bit (ten steps; all when
full). 4. Ctrl-C, with rollout workers, leaves no process, a checkpoint, and the line that resumes, which works. 5.
Another preset lifts it too, by its name alone (full). 6. The configs of code rewards learn, in jails and in Docker
containers. 7. So does the number game (full).
"""

import asyncio
import json
import signal
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_agent.errors import SandboxError
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.trainer.checkpoint import latest_checkpoint
from sandboxes import open_pool
from tests.commands import run, started, until_step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    done = run("areal_agent.train", "--config", "configs/quickstart.yaml", f"run_dir={folder}")
    assert done.returncode == 0, done.stderr
    assert "success on 200 held-out tasks" in done.stdout
    return folder


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_it_learns(quickstart: Path) -> None:
    summary = summary_of(quickstart)
    assert summary["status"] == "completed"
    assert summary["success_before"] <= 0.5
    assert summary["success_after"] >= 0.9
    assert summary["spanning_fraction"] >= 0.2
    assert summary["interrupted_completions"] > 0
    assert summary["max_staleness_seen"] <= 2
    assert set(summary["idle_fraction"]) == {"engine", "trainer"}
    assert (quickstart / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_checkpoint_graded_again_gives_the_same_figure(quickstart: Path, tmp_path: Path) -> None:
    summary = summary_of(quickstart)
    overrides = (f"model={summary['checkpoint']}", f"run_dir={tmp_path / 'eval'}")
    done = run("areal_agent.eval", "--config", "configs/quickstart.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path / "eval")["success"] == pytest.approx(summary["success_after"], abs=0.011)


def test_the_checkpoint_loads_with_transformers(quickstart: Path) -> None:
    checkpoint = summary_of(quickstart)["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.get_input_embeddings().num_embeddings >= len(AutoTokenizer.from_pretrained(checkpoint))


def test_the_ledger_proves_it(quickstart: Path) -> None:
    done = run("areal_agent.ledger", "verify", str(quickstart))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("num_steps", [10, pytest.param(70, marks=pytest.mark.full)])
def test_its_training_comes_out_bit_for_bit(quickstart: Path, num_steps: int) -> None:
    done = run("areal_agent.ledger", "replay", str(quickstart), "--to", str(num_steps))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("as in the run") == num_steps


def test_ctrl_c_ends_cleanly_and_resumes(tmp_path: Path, quickstart: Path) -> None:
    folder = tmp_path / "run"
    command = ("areal_agent.train", "--config", "configs/quickstart.yaml", f"run_dir={folder}")
    with started(*command, "steps=12", "eval.num_tasks=20", "rollout.workers=2") as process:
        until_step(process, folder, 2)
        own = psutil.Process(process.pid)
        assert sum("areal_agent.rollout.worker" in child.cmdline() for child in own.children()) == 2
        children = own.children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"--resume {folder}" in out
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert summary_of(folder)["status"] == "interrupted"
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None and str(checkpoint.path) == summary_of(folder)["checkpoint"]
    assert checkpoint.step == step_rows(read_metrics(folder / "metrics.jsonl"))[-1]["step"]

    done = run("areal_agent.train", "--resume", str(folder), "steps=4")
    assert done.returncode == 0, done.stderr
    assert (summary_of(folder)["status"], summary_of(folder)["steps"]) == ("completed", 4)
    assert verify(folder / "ledger.sqlite").is_ok


@pytest.mark.full
def test_gspo_lifts_the_quickstart(tmp_path: Path) -> None:
    overrides = ["algorithm=gspo", "steps=25", "eval.num_tasks=100", f"run_dir={tmp_path / 'run'}"]
    done = run("areal_agent.train", "--config", "configs/quickstart.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["success_before"] < 0.6
    assert summary["success_after"] > 0.8


async def try_backend(backend: str) -> None:
    async with open_pool(backend=backend) as pool, pool.acquire() as box:
        await box.exec(["true"])


@pytest.mark.parametrize(
    ("config", "backend", "steps"),
    [("code", "jail", 24), pytest.param("code_docker", "docker", 28, marks=pytest.mark.full)],
)
def test_code_rewards_are_learnt(config: str, backend: str, steps: int, tmp_path: Path) -> None:
    try:
        asyncio.run(try_backend(backend))
    except SandboxError as error:
        pytest.skip(str(error))
    folder = tmp_path / "run"
    done = run("areal_agent.train", "--config", f"configs/{config}.yaml", f"run_dir={folder}", f"steps={steps}")
    assert done.returncode == 0, done.stderr
    summary = summary_of(folder)
    assert summary["status"] == "completed"
    assert summary["success_before"] <= 0.5
    assert summary["success_after"] >= summary["success_before"] + 0.25
    assert verify(folder / "ledger.sqlite").is_ok


@pytest.mark.full
def test_the_number_game_is_learnt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run("areal_agent.train", "--config", "configs/number_game.yaml", f"run_dir={folder}")
    assert done.returncode == 0, done.stderr
    summary = summary_of(folder)
    assert summary["success_after"] >= summary["success_before"] + 0.25
    assert verify(folder / "ledger.sqlite").is_ok
