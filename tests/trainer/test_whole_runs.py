"""Whole runs from the command line, with real processes and a small random model (slow).

1. Two synchronous runs of one seed end with the same weights, bit for bit, also where one sends them over a disk, and
keys and values are released while it trains. 2. Each batch is sampled by the weights of the step before it alone.
3. With two ranks, which send theirs by torch.distributed, the first step's weights are those of one rank within
float32's tolerance. 4. The ledger proves each run, engine and trainer agree, and no folder is left. 5. The memory of
every rank is reported. 6. A run that trains adapters: engine and trainer agree on log-probabilities, before and after a
resume, and its steps come out bit for bit.

A gateway serves all rollouts of a step at once. The order of answers and their neighbours in the engine's batch do
not show in the weights; they do show in the last bits of recorded probabilities, so the loss is one that does not
read them.
"""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_agent.cluster.local import PREFIX
from areal_agent.ledger import questions
from areal_agent.ledger.__main__ import main as ledger_command
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.run import Run
from areal_agent.types import Trajectory
from tests.commands import run
from tests.run.test_run import config, end, solve, train

NUM_STEPS = 3
LEARNING_RATE = 1e-3
TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


def whole_run(folder: Path, model: Path, *overrides: str) -> Path:
    """Train by the command, and prove the ledger; the run folder."""
    settings = config(
        folder,
        model,
        workflow="tests.run.test_run:solve",
        max_staleness=0,
        steps=NUM_STEPS,
        seed=7,
        algorithm={"behavior_weight_level": "none"},
        trainer={"learning_rate": LEARNING_RATE, "checkpoint_every": 1, "keep_last": NUM_STEPS},
    )
    (folder / "config.yaml").write_text(settings.to_yaml())
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(folder / "tmp"))
        done = run("areal_agent.train", "--config", str(folder / "config.yaml"), "observe.progress=none", *overrides)
    assert done.returncode == 0, done.stderr
    assert [*(folder / "tmp").glob(f"{PREFIX}*")] == []
    rows = step_rows(read_metrics(folder / "run" / "metrics.jsonl"))
    assert max(row["trainer/logp_diff_fresh_max"] for row in rows) < TOLERANCE
    report = verify(folder / "run" / "ledger.sqlite")
    assert report.is_ok, report
    summary = json.loads((folder / "run" / "summary.json").read_bytes())
    assert (summary["status"], summary["steps"]) == ("completed", NUM_STEPS)
    return folder / "run"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    return whole_run(tmp_path_factory.mktemp("one"), small_model)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    return whole_run(tmp_path_factory.mktemp("two"), small_model, "trainer.num_ranks=2", "trainer.transfer=distributed")


def trained(folder: Path) -> dict[int, list[Trajectory]]:
    """By step: what it was trained on, in the order of its sessions."""

    async def read() -> dict[int, list[Trajectory]]:
        ledger = await Ledger.open(folder / "ledger.sqlite", create=False)
        by_step: dict[int, list[Trajectory]] = {}
        for session, step in sorted((await ledger.ask(questions.leases, 0, NUM_STEPS)).items()):
            by_step.setdefault(step, []).append(await ledger.trajectory(session))
        await ledger.aclose()
        return by_step

    return asyncio.run(read())


def sampled(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """By session: the tokens of each answer."""
    return {
        one.session_id: [completion.token_ids for turn in one.turns for completion in turn.completions]
        for batch in trained(folder).values()
        for one in batch
    }


def weights_file(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}" / "model.safetensors"


def test_two_runs_of_one_seed_end_with_identical_weights(one: Path, small_model: Path, tmp_path: Path) -> None:
    otherwise = ("trainer.transfer=disk", "engine.release_kv=true", "engine.leave_gib=0.25")
    again = whole_run(tmp_path, small_model, *otherwise)
    assert len(sampled(one)) == NUM_STEPS * 8
    assert sampled(again) == sampled(one)
    assert weights_file(again, NUM_STEPS).read_bytes() == weights_file(one, NUM_STEPS).read_bytes()


def test_synchronous_mode_never_mixes_versions(one: Path) -> None:
    mixed = {step: {one.sampled_steps() for one in batch} for step, batch in trained(one).items()}
    assert mixed == {step: {frozenset({step - 1})} for step in range(1, NUM_STEPS + 1)}
    assert {row["staleness/max"] for row in step_rows(read_metrics(one / "metrics.jsonl"))} == {0}


def test_two_ranks_make_the_weights_of_one(one: Path, two: Path, small_model: Path) -> None:
    before = load_file(small_model / "model.safetensors")
    ours, theirs = (load_file(weights_file(folder, 1)) for folder in (one, two))
    assert ours.keys() == theirs.keys()
    moved = max(float((ours[name] - before[name]).abs().max()) for name in before)
    assert moved > LEARNING_RATE / 2
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=0.01 * LEARNING_RATE, rtol=0.0)


def test_the_memory_of_every_rank_is_told(one: Path, two: Path) -> None:
    for folder, names in ((one, {"trainer"}), (two, {"trainer", "trainer_rank1"})):
        for row in step_rows(read_metrics(folder / "metrics.jsonl")):
            assert {name for name in names if row[f"memory/{name}_peak_bytes"] > 0} == names
            assert ("memory/trainer_rank1_peak_bytes" in row) == ("trainer_rank1" in names)


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
    assert await asyncio.to_thread(ledger_command, ["replay", str(resumed.folder.path)]) == 0
