"""Agents that see, end to end: a vision model of random weights learns how an answer looks from demonstrations, then to
name colours by its rewards, with a real vLLM server; both sides agree on every token, and a killed run goes on.
"""

import json
import signal
from pathlib import Path

import pytest

from areal_agent.observe.metrics import read_metrics, step_rows
from envs.pictures.demonstrations import write

from ...commands import run, started, until_step
from ...vision import make_vision_model

pytestmark = pytest.mark.slow

STEPS = 40


def test_a_model_that_sees_learns_by_its_rewards(vllm_python: str, tmp_path: Path) -> None:
    model, chats, folder = tmp_path / "model", tmp_path / "chats.jsonl", tmp_path / "run"
    make_vision_model(model)
    write(chats, 300, seed=0)
    demonstrated = {
        **{"model": str(model), "data": str(chats), "run_dir": str(tmp_path / "shown"), "epochs": 2, "batch_size": 16},
        "trainer": {"packing": "padded", "learning_rate": 3e-3, "warmup_fraction": 0.0},
    }
    sft = tmp_path / "sft.yaml"
    sft.write_text(json.dumps(demonstrated))
    shown = run("areal_agent.sft", "--config", str(sft))
    assert shown.returncode == 0, shown.stderr
    config = (
        *("areal_agent.train", "--config", "configs/pictures.yaml", f"run_dir={folder}"),
        *(f"model={tmp_path / 'shown' / 'model'}", f"engine.python={vllm_python}", f"steps={STEPS}"),
        *("trainer.learning_rate=1e-3", "trainer.checkpoint_every=4", "trainer.warmup_fraction=0.0"),
        *("trainer.epsilon=3e-4", "trainer.gradient_clip_quantile=0.1", "trainer.weight_decay=0.0"),
        *("algorithm.normalize_by_std=false", "batch_size=16", "engine.kv_tokens=16384", "eval.num_tasks=200"),
    )
    with started(*config) as train:
        until_step(train, folder, 6)
        train.send_signal(signal.SIGKILL)
    resumed = run("areal_agent.train", "--resume", str(folder))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rows = step_rows(read_metrics(folder / "metrics.jsonl"))
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))  # after the kill some come again
    assert all(row["trainer/logp_diff_fresh_max"] < 1e-4 for row in rows)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["success_after"] >= summary["success_before"] + 0.15  # from a quarter; 50 steps reach 0.6, 150 0.8
    verified = run("areal_agent.ledger", "verify", str(folder))
    assert verified.returncode == 0, verified.stdout + verified.stderr
