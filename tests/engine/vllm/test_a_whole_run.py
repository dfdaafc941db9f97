"""`configs/quickstart_vllm.yaml`, shortened, with a real vLLM server that the run starts: it learns, its ledger is
verified, answers span weight versions, no call fails, and no server is left behind.
"""

from pathlib import Path

import pytest

from areal_agent.observe.metrics import read_metrics, step_rows

from ..sglang.test_a_whole_run import train, trained

pytestmark = pytest.mark.slow


def test_a_run_with_a_server_of_its_own(vllm_python: str, tmp_path: Path) -> None:
    summary = trained("vllm", tmp_path / "run", vllm_python, "steps=14", "eval.num_tasks=100")
    assert summary["steps"] == 14
    assert summary["success_after"] >= summary["success_before"] + 0.2  # from a third; in all its 70 steps above 0.9


def test_a_run_whose_server_applies_adapters(vllm_python: str, tmp_path: Path) -> None:
    """Adapters are pushed alone; samples agree with the trainer; a resume goes on with the adapters."""
    folder = tmp_path / "run"
    settings = (
        *("eval.num_tasks=0", "trainer.checkpoint_every=2", "batch_size=4", "group_size=4"),
        *("trainer.lora.push=adapter", "trainer.learning_rate=1e-2", "trainer.warmup_fraction=0.0"),
    )
    for steps, more in ((2, ()), (4, ("--resume", str(folder)))):
        train("vllm", folder, vllm_python, *settings, f"steps={steps}", *more)
    rows = step_rows(read_metrics(folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["trainer/logp_diff_fresh_max"] < 1e-3 for row in rows)
