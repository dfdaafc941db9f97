"""A run that trains adapters, with the embedded engine (slow).

What the engine samples under merged weights is what the trainer finds under its model with adapters, before and after
the run is resumed, and the ledger proves it.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.run import Run
from tests.run.test_run import config, end, solve, train

TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


async def test_engine_and_trainer_agree_and_the_run_is_resumed(tmp_path: Path, small_model: Path) -> None:
    trainer = {"learning_rate": 2e-2, "warmup_fraction": 0.0, "checkpoint_every": 2, "lora": {"rank": 4}}
    settings = config(tmp_path, small_model, steps=6, trainer=trainer)
    async with Run(settings, workflow=solve) as run:
        await train(run, 3)
        await run.stop_producing()
        await run.save()
        await run.settle(is_completed=False)
    async with Run(settings, workflow=solve, resume=str(run.folder.path)) as resumed:
        assert resumed.step == 3
        await train(resumed, 6)
        await end(resumed)
    rows = step_rows(read_metrics(resumed.folder.metrics))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["trainer/logp_diff_fresh_max"] < TOLERANCE for row in rows)
    before = load_file(small_model / "model.safetensors")
    after = load_file(resumed.folder.checkpoints / "step_000006" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (after[name] - before[name]).abs().max() > 1e-2
    report = verify(resumed.folder.ledger)
    assert report.is_ok, report
