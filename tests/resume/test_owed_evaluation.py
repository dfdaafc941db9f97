"""An evaluation beside training that died with its process is made up for after the resume, under the weights with
which the run goes on."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import evaluation_rows, read_metrics
from areal_agent.trainer.checkpoint import latest_checkpoint
from tests.resume.test_saving import ROOT, read_until
from tests.run.test_run import config
from tests.run.test_run import solve as answer

HELD_BY = "HELD_BY_METRICS"
"""Names the run's metrics.jsonl: evaluations after the first one never end."""


def is_held() -> bool:
    return HELD_BY in os.environ and "before" in Path(os.environ[HELD_BY]).read_text()


async def solve(task: Any, rollout: Any) -> float:
    if rollout.is_eval and is_held():
        await asyncio.Event().wait()
    return await answer(task, rollout)


@pytest.mark.slow
def test_an_evaluation_that_died_is_made_up_for(tmp_path: Path, small_model: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "config.yaml"
    settings = config(
        tmp_path,
        small_model,
        workflow=f"{__name__}:solve",
        steps=3,
        rollout={"max_concurrent": 16, "max_tokens": 8},
        trainer={"checkpoint_every": 1},
        eval={"num_tasks": 2, "tasks": str(tmp_path / "tasks.jsonl"), "every": 1},
    )
    file.write_text(settings.to_yaml())
    train = [sys.executable, "-m", "areal_agent.train"]
    with subprocess.Popen(
        [*train, "--config", str(file), "observe.progress=plain"],
        cwd=ROOT,
        env=os.environ | {HELD_BY: str(folder / "metrics.jsonl")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            read_until(process, "2/3")  # by then the evaluation of step 1 has begun, and that step is saved
            children = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
            process.communicate()
    assert not psutil.wait_procs(children, timeout=60)[1]  # none publishes a checkpoint any more
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    assert [row["label"] for row in evaluation_rows(read_metrics(folder / "metrics.jsonl"))] == ["before"]
    done = subprocess.run(
        [*train, "--resume", str(folder), f"steps={checkpoint.step + 1}", "observe.progress=none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = evaluation_rows(read_metrics(folder / "metrics.jsonl"))
    labels = [(row["label"], row["incarnation"]) for row in rows]
    assert labels == [("before", 0), (f"step{checkpoint.step}", 1), ("after", 1)]
    assert verify(folder / "ledger.sqlite").violations == ()
