"""The configs for GPUs: each is valid, fits by the doctor's estimate, and has its tasks and its workflow."""

from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.doctor.findings import State
from areal_agent.doctor.machine import GIB, Machine
from areal_agent.doctor.memory import memory_findings
from areal_agent.doctor.model import ModelShape
from areal_agent.rollout.tasks.loading import load_tasks, require_json
from areal_agent.rollout.workflow import load_workflow
from areal_agent.run.preflight import load_eval_tasks
from tests.doctor.shapes import QWEN3_06B, QWEN3_4B, QWEN3_17B

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "shape", "num_gpus", "gib"),
    [
        ("qwen3_0.6b_1gpu", QWEN3_06B, 1, 24),
        ("qwen3_1.7b_1gpu", QWEN3_17B, 1, 80),
        ("qwen3_4b_1gpu_lora", QWEN3_4B, 1, 80),
        ("qwen3_0.6b_1gpu_vllm", QWEN3_06B, 1, 24),
        ("qwen3_4b_8gpu", QWEN3_4B, 8, 80),
        ("qwen3_4b_8gpu_vllm", QWEN3_4B, 8, 80),
    ],
)
async def test_it_fits(name: str, shape: ModelShape, num_gpus: int, gib: int) -> None:
    config = Config.load(CONFIGS / f"{name}.yaml")
    machine = Machine(memory_bytes=256 * GIB, num_gpus=num_gpus, gpu_bytes=gib * GIB)
    findings = await memory_findings(shape, config, machine)
    assert [finding.check for finding in findings] == ["memory", *(f"GPU {number}" for number in range(num_gpus))]
    assert [finding for finding in findings if finding.state is not State.OK] == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("qwen3_*.yaml")), ids=lambda path: path.stem)
def test_its_tasks_and_workflow_are_there(path: Path) -> None:
    config = Config.load(path)
    assert config.tasks is not None
    tasks, held_out = load_tasks(config.tasks, "train", config.seed), load_eval_tasks(config)
    assert len(tasks) > 0
    assert len(held_out) == config.eval.num_tasks
    require_json((*tasks, *held_out))  # workers or not: one that adds them goes on
    assert callable(load_workflow(config.workflow))
