"""The cases that every change of the trainer has to pass and that need two ranks: real processes, gloo, FSDP2 (slow).

4. gradients do not depend on the number of ranks; in bfloat16 within its rounding
9. ranks have equally many micro-batches, also where there are fewer sequences than ranks
15. a checkpoint of two ranks resumes at one rank, and back

With `transfer: distributed`, an engine is sent half of the weights by each rank.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_agent.algorithms.config import PRESETS, AlgorithmConfig
from areal_agent.engine.embedded.transfer import BLOCK_BYTES
from areal_agent.trainer.config import LoraConfig, TrainerConfig, TrainerSetup
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput
from tests.trainer.lab import GRADIENT_DESCENT, Lab
from tests.trainer.two_ranks import Outcome, Work, flat, run_two_ranks

pytestmark = pytest.mark.slow

BUDGET = 100
PACKINGS = ("balanced", "first_fit", "padded")
WITH_ALL = AlgorithmConfig(preset="ppo", reference="initial", kl_coefficient=0.1, kl_in="reward", minibatches=2)
"""Proximal, reference and values are all measured before the updates."""
WITH_REFERENCE = AlgorithmConfig(reference="initial", kl_coefficient=0.1)
LORA = LoraConfig(rank=4, alpha=8.0)
LABS = {
    **{preset: (GRADIENT_DESCENT, AlgorithmConfig(preset=preset)) for preset in PRESETS},
    **{packing: (GRADIENT_DESCENT.model_copy(update={"packing": packing}), AlgorithmConfig()) for packing in PACKINGS},
    "with all": (GRADIENT_DESCENT.model_copy(update={"learning_rate": 1e4}), WITH_ALL),
    "adapters": (GRADIENT_DESCENT.model_copy(update={"lora": LORA}), WITH_REFERENCE),
    "recomputed": (GRADIENT_DESCENT.model_copy(update={"gradient_checkpointing": True}), AlgorithmConfig(preset="ppo")),
}
NAMES = (*LABS, "distilled")
TRAINER = TrainerConfig(
    learning_rate=1e-3, gradient_clip=100.0, gradient_clip_quantile=0.1, tokens_per_micro_batch=BUDGET
)
TRAINERS = {  # whole: the quantile's history begins in the first step and clips in the second
    "whole": (TRAINER, WITH_ALL.model_copy(update={"minibatches": 5})),
    "adapters": (TRAINER.model_copy(update={"lora": LORA}), WITH_REFERENCE),
}


@pytest.fixture(scope="module")
def first(make_batch, as_input) -> StepInput:
    return as_input(make_batch(1))


@pytest.fixture(scope="module")
def second(make_batch, as_input) -> StepInput:
    return as_input(make_batch(2))


def one_rank(model: Path, name: str, base: Path, folder: Path) -> Trainer:
    config, algorithm = TRAINERS[name]
    setup = {"model": model, "base": base, "trainer": config, "algorithm": algorithm}
    return Trainer(TrainerSetup(**setup, seed=0, shared_memory=folder))


@pytest.fixture(scope="module")
def saved_by_one(model_folder, first, tmp_path_factory) -> dict[str, Path]:
    saved: dict[str, Path] = {}
    for name in TRAINERS:
        folder = tmp_path_factory.mktemp(name)
        trainer = one_rank(model_folder, name, model_folder, folder)
        trainer.train_step(first)
        checkpoint = trainer.save(folder, step=1, incarnation=0)
        trainer.close()
        assert checkpoint is not None
        saved[name] = checkpoint.path
    return saved


@pytest.fixture(scope="module")
def labs(teacher_folder) -> dict[str, tuple[TrainerConfig, AlgorithmConfig]]:
    distilled = AlgorithmConfig.model_validate({"teacher": {"model": str(teacher_folder), "reward_weight": 1.0}})
    return {**LABS, "distilled": (GRADIENT_DESCENT, distilled)}


@pytest.fixture(scope="module")
def outcome(labs, model_folder, first, second, saved_by_one, tmp_path_factory) -> Outcome:
    labs = {
        name: (config.model_copy(update={"tokens_per_micro_batch": BUDGET}), algorithm)
        for name, (config, algorithm) in labs.items()
    }
    labs["bfloat16"] = (labs["first_fit"][0].model_copy(update={"dtype": "bfloat16"}), AlgorithmConfig())
    work = Work(model=model_folder, first=first, second=second, labs=labs, trainers=TRAINERS, checkpoints=saved_by_one)
    return run_two_ranks(work, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", NAMES)
def test_case_04_gradients_do_not_depend_on_the_number_of_ranks(labs, model_folder, first, outcome, name):
    config, algorithm = labs[name]
    alone = Lab(model_folder, config, algorithm)
    metrics = alone.stepper.train(first)
    moved = outcome.weights[name] - alone.before
    torch.testing.assert_close(moved, alone.weights() - alone.before, atol=3e-6, rtol=1e-4)
    counted = outcome.metrics[name]
    for measure in ("loss", "grad_norm", "entropy", "num_loss_tokens", "num_input_tokens", "logp_diff_max"):
        assert counted[measure] == pytest.approx(metrics[measure], rel=1e-4, abs=1e-6), measure


def test_case_04_gradients_in_bfloat16_are_those_of_float32_within_rounding(model_folder, outcome):
    start, exact, half = Lab(model_folder).before, outcome.weights["first_fit"], outcome.weights["bfloat16"]
    assert 0 < (half - exact).norm() < 0.03 * (exact - start).norm()


@pytest.mark.parametrize("name", NAMES)
def test_case_09_ranks_have_equally_many_micro_batches(outcome, name):
    assert outcome.metrics[name]["num_micro_batches"] % 2 == 0


@pytest.mark.parametrize("name", TRAINERS)
def test_case_15_a_checkpoint_of_two_ranks_resumes_at_one(outcome, model_folder, second, tmp_path, name):
    trainer = one_rank(Path(outcome.saved[name]), name, model_folder, tmp_path)
    trainer.train_step(second)
    torch.testing.assert_close(flat(trainer), outcome.straight[name], atol=1e-5, rtol=1e-4)
    trainer.close()


@pytest.mark.parametrize("name", TRAINERS)
def test_case_15_a_checkpoint_of_one_rank_resumes_at_two(outcome, model_folder, saved_by_one, second, tmp_path, name):
    trainer = one_rank(saved_by_one[name], name, model_folder, tmp_path)
    trainer.train_step(second)
    torch.testing.assert_close(outcome.resumed[name], flat(trainer), atol=1e-5, rtol=1e-4)
    trainer.close()


def test_an_engine_is_sent_half_of_the_weights_by_each_rank(outcome, model_folder):
    expected = load_file(model_folder / "model.safetensors")
    assert outcome.sent.keys() == expected.keys()
    assert all(torch.equal(outcome.sent[name], expected[name]) for name in expected)
    first, second = outcome.part_bytes
    assert 0 <= first - second <= 2 * BLOCK_BYTES
