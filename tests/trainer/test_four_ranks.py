"""Four ranks, in meshes of two dimensions, compute and save what one rank does (slow).

1. that share the tokens of a row (Ulysses): loss and gradients in float64 are one rank's, for two ranks, for four with
fewer key-value heads, and two by two; 2. a train step with a critic makes the weights and metrics of one rank, also
with replicas of the model (HSDP), also both; 3. a save beside a step holds the weights before that step, byte for byte
what a save at once holds, and resumes at one rank; a checkpoint of one rank resumes at two replicas; 4. a save that one
rank cannot write fails for all, and the next succeeds.

The private memory of each of four ranks, with a model of 12 equal layers.

- While it loads, a rank has a quarter of the model, two layers of it that are gathered, and the trial that proves the
  attention; when it publishes and exports, it needs no more than a layer besides.
- After a step it has the quarters of Adam's two moments, and while it steps that of the gradients, gathered layers and
  a micro-batch.
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.trainer.config import TrainerConfig
from tests.trainer.four_ranks import LAYOUTS, MESHES, Work, loss_and_gradient
from tests.trainer.lab import GRADIENT_DESCENT, Lab, held_by
from tests.trainer.two_ranks import flat

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WITH_ALL = AlgorithmConfig(preset="ppo", reference="initial", kl_coefficient=0.1, kl_in="reward", minibatches=2)
NOT_COMPARED = ("seconds", "padding_fraction", "num_micro_batches", "shared_positions", "repeated_positions")


class Found(NamedTuple):
    work: Work
    folder: Path
    by: dict[str, Any]
    alone: torch.Tensor  # the weights of one rank after two steps


@pytest.fixture(scope="module")
def found(model_folder: Path, make_batch: Any, as_input: Any, tmp_path_factory: Any) -> Found:
    """What four ranks find. The model has 4 heads, which share 2 key-value heads."""
    folder: Path = tmp_path_factory.mktemp("four")
    work = Work(
        model=model_folder,
        first=as_input(make_batch(1)),
        second=as_input(make_batch(2)),
        lab=(GRADIENT_DESCENT, AlgorithmConfig(preset="ppo", minibatches=1)),
        trainer=(TrainerConfig(learning_rate=1e-3), WITH_ALL),
        checkpoint=folder / "alone" / "step_000001",
    )
    trainer = work.load(model_folder, folder)
    trainer.train_step(work.first)
    trainer.save(folder / "alone", step=1, incarnation=0)
    trainer.train_step(work.second)
    alone = flat(trainer)
    trainer.close()
    (folder / "is a file").touch()
    (folder / "work.pickle").write_bytes(pickle.dumps(work))
    subprocess.run([sys.executable, "-m", "tests.trainer.four_ranks", str(folder)], cwd=ROOT, check=True)
    return Found(work, folder, torch.load(folder / "outcome.pt", weights_only=True), alone)


def test_ranks_that_share_rows_compute_what_one_does(found: Found) -> None:
    loss, gradient = loss_and_gradient(found.work.model, [[0, 1, 2]])
    for name in LAYOUTS:
        of_ranks, of_gradient = found.by[name]
        assert abs(of_ranks - loss) < 1e-9, name
        assert (of_gradient - gradient).abs().max() < 1e-9, name
    assert gradient.abs().max() > 0.1


def test_a_step_does_not_depend_on_the_mesh(found: Found) -> None:
    alone = Lab(found.work.model, *found.work.lab)
    metrics = alone.stepper.train(found.work.first)
    compared = {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}
    for name in MESHES:
        step = found.by[f"step, {name}"]
        torch.testing.assert_close(step["weights"] - alone.before, alone.weights() - alone.before, atol=2e-6, rtol=1e-4)
        assert {one: step["metrics"][one] for one in compared} == pytest.approx(compared, rel=1e-3, abs=1e-5), name


def test_a_save_beside_a_step_is_one_before_it(found: Found) -> None:
    at_once, beside, later = (
        held_by(found.folder / path) for path in ("at once/step_000001", "beside/step_000001", "beside/step_000002")
    )
    assert at_once == beside
    assert at_once.keys() == later.keys()
    assert at_once["model.safetensors"] != later["model.safetensors"]
    assert len([name for name in beside if name.startswith("training/shard")]) == 4
    torch.testing.assert_close(found.by["after a step beside a save"], found.alone, atol=1e-5, rtol=1e-4)


def test_replicas_and_one_rank_resume_from_each_other(found: Found, tmp_path: Path) -> None:
    torch.testing.assert_close(found.by["resumed"], found.alone, atol=1e-5, rtol=1e-4)
    resumed = found.work.load(found.folder / "beside" / "step_000001", tmp_path)
    resumed.train_step(found.work.second)
    torch.testing.assert_close(flat(resumed), found.alone, atol=1e-5, rtol=1e-4)
    resumed.close()


def test_a_save_that_one_rank_cannot_write_fails_for_all(found: Found) -> None:
    file, of_first, of_last, none = found.by["faults"]
    assert "is a file" in file
    assert of_first == of_last == "[Errno 27] File too large"
    assert none == ""
    torch.testing.assert_close(found.by["after failures"], found.alone, atol=1e-5, rtol=1e-4)
    assert [path.name for path in (found.folder / "at once").iterdir()] == ["step_000001"]


BATCH = 22 * 2**20
"""The activations and logits of the trial at load, or of a micro-batch, of 12 layers of this size."""


def test_no_rank_has_more_than_a_quarter_a_layer_and_the_batch() -> None:
    command = [sys.executable, "benchmarks/trainer/memory.py", "--layers", "12", "--hidden", "256", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    peak, left = ({phase: max(ranks) for phase, ranks in found[name].items()} for name in ("peak", "left"))
    (model,), (layer,), (rest,) = (found["size"][name] for name in ("model", "layer", "rest"))
    quarter, gathered = model // 4, 2 * layer + rest
    assert peak["load"] < quarter + gathered + BATCH < model
    assert peak["publish"] < layer > peak["export"]
    assert left["first step"] < 2 * quarter + BATCH
    assert peak["step"] < quarter + gathered + layer + BATCH + quarter
