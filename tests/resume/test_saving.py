"""Saving, as it is seen from outside a run with real processes.

1. agents are answered while a save goes on; 2. SIGTERM saves the last trained step, says how to go on, and ends with
the status interrupted; 3. a second SIGTERM, a while after the first, ends all at once: no process is left, and the
ledger is in order.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics
from areal_agent.run import Run
from areal_agent.trainer.checkpoint import latest_checkpoint
from tests.run.test_run import config, end, solve, train

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


async def test_agents_are_answered_while_a_save_goes_on(tmp_path: Path, small_model: Path) -> None:
    answered: asyncio.Queue[None] = asyncio.Queue()

    async def telling(task, rollout) -> float:
        reward = await solve(task, rollout)
        answered.put_nowait(None)
        return reward

    async with Run(config(tmp_path, small_model, max_staleness=50), workflow=telling) as run:
        await train(run, 1)
        os.kill(run._trainer_process.pid, signal.SIGSTOP)  # a save that takes as long as the test wants
        saving = asyncio.create_task(run.save())
        await asyncio.sleep(0)
        for _ in range(answered.qsize() + 8):
            await answered.get()
        assert not saving.done()
        os.kill(run._trainer_process.pid, signal.SIGCONT)
        assert (await saving).name == "step_000001"
        await end(run)


@contextmanager
def running(tmp_path: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    """The main job; it has trained two steps."""
    settings = config(tmp_path, model, steps=1000).model_copy(update={"workflow": "tests.run.test_run:solve"})
    file = tmp_path / "config.yaml"
    file.write_text(settings.to_yaml())
    command = [sys.executable, "-m", "areal_agent.train", "--config", str(file), "observe.progress=plain"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            read_until(process, "2/1000")
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"the run ended before it said {text!r}:\n{''.join(lines)}")


def test_sigterm_saves_and_says_how_to_go_on(tmp_path: Path, small_model: Path) -> None:
    folder = tmp_path / "run"
    with running(tmp_path, small_model) as process:
        process.send_signal(signal.SIGTERM)
        read_until(process, f"--resume {folder}")
        process.communicate()
    assert process.returncode == 130
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row.get("kind", "step") == "step"]
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None and checkpoint.step == max(steps)
    assert json.loads((folder / "summary.json").read_bytes())["status"] == "interrupted"
    assert verify(folder / "ledger.sqlite").violations == ()


def test_a_second_sigterm_ends_all_at_once(tmp_path: Path, small_model: Path) -> None:
    with running(tmp_path, small_model) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        trainer = next(child for child in children if "areal_agent.trainer" in child.cmdline())
        trainer.suspend()  # no save ends
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        trainer.resume()
    assert process.returncode == 130
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert verify(tmp_path / "run" / "ledger.sqlite").violations == ()
