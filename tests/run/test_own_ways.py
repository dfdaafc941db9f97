"""Runs whose engine and trainer share the machine in other ways than by default:

- weights go over a disk, or by torch.distributed: what is sampled after each push has the trainer's probabilities,
  and no folder is left
- keys and values are released while the trainer trains: answers under way wait, and the ledger proves the run
- they come back when a train step fails, too; without `release_kv` the engine is left alone
- what says the same twice, or is not heeded by the engine that was chosen, is refused
"""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.run import Run
from areal_agent.run.sources import OwnRollouts
from tests.run.test_run import config, end, solve, train


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["disk", "distributed"])
async def test_weights_go_another_way(transfer: str, tmp_path: Path, small_model: Path) -> None:
    trainer = {"learning_rate": 1e-3, "transfer": transfer}
    async with Run(config(tmp_path, small_model, max_staleness=0, steps=3, trainer=trainer), workflow=solve) as run:
        await train(run, 3)
        await end(run)
    rows = step_rows(read_metrics(run.folder.metrics))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["trainer/logp_diff_fresh_max"] < 1e-4 for row in rows)
    assert verify(run.folder.ledger).is_ok
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(f"areal_agent-{os.getpid()}-")]


@pytest.mark.slow
async def test_keys_and_values_are_released_while_the_trainer_trains(tmp_path: Path, small_model: Path) -> None:
    engine = {"max_running_requests": 16, "max_context_tokens": 256, "release_kv": True, "leave_gib": 0.25}
    async with Run(config(tmp_path, small_model, steps=3, engine=engine), workflow=solve) as run:
        await train(run, 3)
        await end(run)
    rows = step_rows(read_metrics(run.folder.metrics))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["trainer/logp_diff_fresh_max"] < 1e-4
    assert verify(run.folder.ledger).is_ok


class Memory:
    """A `MemoryHolder` that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def release_memory(self) -> None:
        self.calls.append("release")

    async def resume_memory(self) -> None:
        self.calls.append("resume")


def rollouts_with(memory: Memory | None) -> OwnRollouts:
    serving = SimpleNamespace(engine=SimpleNamespace(memory=memory))
    return OwnRollouts(serving=serving, producer=None, ledger=None, batch_size=1)  # pyright: ignore[reportArgumentType]


async def test_the_memory_comes_back_when_a_train_step_fails() -> None:
    memory = Memory()
    with pytest.raises(ValueError, match="training failed"):
        async with rollouts_with(memory).memory_lent():
            assert memory.calls == ["release"]
            raise ValueError("training failed")
    assert memory.calls == ["release", "resume"]


async def test_an_engine_whose_memory_is_not_to_be_lent_is_left_alone() -> None:
    async with rollouts_with(None).memory_lent():
        pass


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kv_tokens": 512, "leave_gib": 1}, "kv_tokens is 512 and engine.leave_gib 1, but .* leave one out"),
        ({"urls": ["http://127.0.0.1:1"], "leave_gib": 1}, "leave_gib only applies to the embedded engine"),
        ({"urls": ["http://127.0.0.1:1"], "release_kv": True}, "release_kv only applies to the embedded engine"),
        ({"leave_gib": float("nan")}, "leave_gib"),
    ],
)
def test_what_would_have_no_effect_is_refused(engine: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.parse({"tasks": "tasks.jsonl", "eval": {"num_tasks": 0}, "engine": engine})
