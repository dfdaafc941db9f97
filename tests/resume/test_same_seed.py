"""Two runs of one seed in synchronous mode end with identical weights.

Each has real processes and a gateway that serves all rollouts of a step at once: what they answer, in which order, and
beside whom in a batch of the engine must not show in the weights. What is recorded of a token's probability does show
it, in the last bits: so the loss is one that does not read that.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_agent.run import Run
from tests.test_run import config, end, solve, train

NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a run came to."""

    sampled: dict[str, tuple[tuple[int, ...], ...]]  # by session: the tokens of each answer
    weights: str  # the digest of the exported file


async def trained(folder: Path, model: Path) -> Trained:
    settings = config(
        folder, model, max_staleness=0, steps=NUM_STEPS, seed=7, algorithm={"behavior_weight_level": "none"}
    )
    async with Run(settings, workflow=solve) as run:
        await train(run, NUM_STEPS)
        sessions = await run._ledger.leases(0, NUM_STEPS)
        trajectories = [await run._ledger.trajectory(session) for session in sorted(sessions)]
        await end(run)
    sampled = {
        one.session_id: tuple(completion.token_ids for turn in one.turns for completion in turn.completions)
        for one in trajectories
    }
    file = run.folder.checkpoints / f"step_{NUM_STEPS:06d}" / "model.safetensors"
    return Trained(sampled=sampled, weights=hashlib.sha256(file.read_bytes()).hexdigest())


@pytest.mark.slow
async def test_two_runs_of_one_seed_have_identical_weights(tmp_path_factory, small_model: Path) -> None:
    first, second = [await trained(tmp_path_factory.mktemp(name), small_model) for name in ("first", "second")]
    assert first.sampled == second.sampled
    assert first.weights == second.weights
