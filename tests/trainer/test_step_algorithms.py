"""Train steps of every algorithm on a real, tiny model.

- With each preset rewarded tokens become likelier, and its gradient does not depend on the split into micro-batches.
- A critic learns returns: its loss falls, and it explains more of them.
- A reference that is the policy changes nothing; another one pulls the policy to it, by the loss or by the rewards.
- The entropy bonus raises entropy. Named parts of the reward count with their weights.
- Mismatch with the engine is told whatever the ratio is taken to, and without what the step's own updates change.
- A user's own loss and advantage train; a checkpoint of critic and reference goes on exactly, and is refused without.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.algorithms.config import PRESETS, AlgorithmConfig
from areal_agent.algorithms.losses import LossTokens
from areal_agent.errors import ConfigError
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.trainer import Trainer
from tests.trainer.lab import Lab

LEARNING = TrainerConfig(learning_rate=3e-3)
REFERRED = {"reference": "initial", "kl_coefficient": 0.5}


def gap(lab: Lab, batch, rewards) -> float:
    """How much likelier the tokens of good rollouts are than those of bad ones."""

    def mean(reward: float) -> float:
        chosen = [one for one in batch.records if rewards[one.session_id] == reward]
        with torch.no_grad():
            return float(torch.cat([lab.logprobs(one)[torch.from_numpy(one.loss_mask)[1:]] for one in chosen]).mean())

    return mean(1.0) - mean(0.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_rewarded_tokens_become_likelier(model_folder, make_batch, as_input, preset):
    batch = make_batch(1, num_groups=2)
    given = as_input(batch)
    lab = Lab(model_folder, LEARNING, AlgorithmConfig(preset=preset))
    before = gap(lab, batch, given.rewards)
    for _ in range(5):
        lab.stepper.train(given)
    assert gap(lab, batch, given.rewards) > before + 0.5


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_does_not_depend_on_the_split(model_folder, make_batch, as_input, preset):
    given = as_input(make_batch(1))
    algorithm = AlgorithmConfig(preset=preset, **REFERRED, entropy_coefficient=0.01)
    whole = Lab(model_folder, algorithm=algorithm).gradient(given)
    split = Lab(model_folder, algorithm=algorithm, budget=30).gradient(given)
    torch.testing.assert_close(split, whole, atol=2e-6, rtol=1e-4)


def test_a_critic_learns_returns(model_folder, make_batch, as_input):
    given = as_input(make_batch(1))
    lab = Lab(model_folder, TrainerConfig(learning_rate=1e-6), AlgorithmConfig(preset="ppo", critic_learning_rate=3e-3))
    told = [lab.stepper.train(given) for _ in range(12)]
    assert told[0]["value_loss"] == pytest.approx(mean_square_return(given) / 2)  # every value is 0 at first
    assert told[-1]["value_loss"] < 0.5 * told[0]["value_loss"]
    assert told[0]["value_explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert told[-1]["value_explained_variance"] > 0.3


def mean_square_return(given) -> float:
    counts = {one.session_id: 0 for one in given.records}
    for one in given.records:
        counts[one.session_id] += int(one.loss_mask.sum())
    return sum(count * given.rewards[name] ** 2 for name, count in counts.items()) / sum(counts.values())


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
@pytest.mark.parametrize("paid_in", ["loss", "reward"])
def test_a_reference_that_is_the_policy_changes_nothing(model_folder, make_batch, as_input, preset, paid_in):
    given = as_input(make_batch(1))
    referred = Lab(model_folder, algorithm=AlgorithmConfig(preset=preset, **REFERRED, kl_in=paid_in))
    plain = Lab(model_folder, algorithm=AlgorithmConfig(preset=preset))
    torch.testing.assert_close(referred.gradient(given), plain.gradient(given), atol=2e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def other_folder(model_folder, tmp_path_factory) -> Path:
    """The model with somewhat different weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model_folder, folder)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    moved = {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("options", [{}, {"kl_estimator": "k2"}, {"kl_in": "reward", "kl_estimator": "k1"}])
def test_the_policy_is_pulled_to_its_reference(model_folder, other_folder, make_batch, as_input, options):
    flat = replace(as_input(make_batch(1)), rewards={})
    records = [replace(one, turn_rewards=0 * one.turn_rewards) for one in flat.records]
    given = replace(flat, records=records, rewards={one.session_id: 0.0 for one in records})
    algorithm = AlgorithmConfig(advantage="reinforce_pp", normalize_by_std=False, **{**REFERRED, **options})
    lab = Lab(model_folder, TrainerConfig(learning_rate=1e-3), algorithm, reference=other_folder)
    told = [lab.stepper.train(given)["kl_ref"] for _ in range(6)]
    assert 0.0 < told[-1] < 0.8 * told[0]


def test_the_entropy_bonus_raises_entropy(model_folder, make_batch, as_input):
    given = as_input(make_batch(1))
    labs = [Lab(model_folder, LEARNING, AlgorithmConfig(entropy_coefficient=one)) for one in (0.0, 1.0)]
    without, with_bonus = ([lab.stepper.train(given)["entropy"] for _ in range(6)] for lab in labs)
    assert with_bonus[0] == without[0]
    assert with_bonus[-1] > without[-1] + 0.05


def test_named_parts_count_with_their_weights(model_folder, make_batch, as_input):
    batch = make_batch(1)
    parts = {one.session_id: {"style": float(number)} for number, one in enumerate(batch.trained)}
    given = replace(as_input(batch), parts=parts)
    totals = {name: reward + 0.5 * parts[name]["style"] for name, reward in given.rewards.items()}
    by_hand = [
        replace(one, turn_rewards=np.array([0.0, totals[one.session_id]], dtype=np.float32)) for one in batch.records
    ]
    weighted = Lab(model_folder, algorithm=AlgorithmConfig(reward_parts={"style": 0.5})).gradient(given)
    expected = Lab(model_folder).gradient(replace(given, records=by_hand, rewards=totals, parts={}))
    assert torch.equal(weighted, expected)


@pytest.mark.parametrize("proximal", ["behavior", "approximate"])
def test_mismatch_is_told_whatever_the_ratio_is_taken_to(model_folder, make_batch, as_input, proximal):
    given = as_input(make_batch(1))
    plain = Lab(model_folder, algorithm=AlgorithmConfig(minibatches=2)).stepper.train(given)
    told = Lab(model_folder, algorithm=AlgorithmConfig(minibatches=2, proximal=proximal)).stepper.train(given)
    assert told["logp_diff_mean"] > 0.5
    assert plain["logp_diff_mean"] > 0.5
    assert told["behavior_weight_max"] == pytest.approx(1.0)  # fresh tokens: the approximation is the behaviour policy


@pytest.mark.parametrize("proximal", ["recompute", "behavior", "approximate"])
def test_what_an_update_changed_is_no_mismatch(model_folder, make_batch, as_input, proximal):
    config = TrainerConfig(learning_rate=1e-2)
    lab = Lab(model_folder, config, AlgorithmConfig(minibatches=3, proximal=proximal))
    batch = make_batch(1)
    exact = [
        replace(one, behavior_logprobs=np.append(0.0, lab.logprobs(one).detach().numpy()).astype(np.float32))
        for one in batch.records
    ]
    metrics = lab.stepper.train(as_input(batch, exact))
    assert metrics["num_fresh_tokens"] > 0
    assert metrics["logp_diff_fresh_max"] < 1e-5


def reinforce(tokens: LossTokens, config: AlgorithmConfig) -> torch.Tensor:
    return tokens.advantages * tokens.logprobs


def raw_reward(records, rewards, config) -> list[torch.Tensor]:
    return [torch.full((len(one.token_ids),), rewards[one.session_id] - 0.5) for one in records]


def test_a_users_own_loss_and_advantage_train(model_folder, make_batch, as_input):
    batch = make_batch(1, num_groups=2)
    given = as_input(batch)
    algorithm = AlgorithmConfig(loss=f"{__name__}:reinforce", advantage=f"{__name__}:raw_reward")
    lab = Lab(model_folder, LEARNING, algorithm)
    before = gap(lab, batch, given.rewards)
    told = [lab.stepper.train(given) for _ in range(5)]
    assert gap(lab, batch, given.rewards) > before + 0.5
    assert (told[0]["advantage_min"], told[0]["advantage_max"]) == (-0.5, 0.5)


@pytest.fixture
def load_trainer(tmp_path):
    trainers: list[Trainer] = []

    def load(folder: Path, algorithm: AlgorithmConfig) -> Trainer:
        config = TrainerConfig(learning_rate=1e-3, warmup_fraction=0.5)
        trainers.append(
            Trainer.load(folder, config=config, algorithm=algorithm, seed=0, shared_memory=tmp_path, num_steps=20)
        )
        return trainers[-1]

    yield load
    for trainer in trainers:
        trainer.close()


FULL = AlgorithmConfig(preset="ppo", minibatches=3, **REFERRED)


def test_a_checkpoint_of_critic_and_reference_goes_on_exactly(
    load_trainer, model_folder, make_batch, as_input, tmp_path
):
    steady = load_trainer(model_folder, FULL)
    for step in (1, 2):
        steady.train_step(as_input(make_batch(step)))
    resumed = load_trainer(steady.save(tmp_path / "checkpoints", step=2, incarnation=0).path, FULL)
    for step in (3, 4):
        both = [one.train_step(as_input(make_batch(step))).metrics for one in (steady, resumed)]
        ours, theirs = ({name: value for name, value in one.items() if "seconds" not in name} for one in both)
        assert ours == theirs
        assert ours["kl_ref"] > 0.0


@pytest.mark.parametrize(("asked", "missing"), [({"preset": "ppo"}, "critic"), ({"reference": "initial"}, "reference")])
def test_a_checkpoint_without_what_the_algorithm_asks_for_is_refused(
    load_trainer, model_folder, tmp_path, asked, missing
):
    saved = load_trainer(model_folder, AlgorithmConfig()).save(tmp_path / "checkpoints", step=0, incarnation=0)
    with pytest.raises(ConfigError, match=f"was saved without a {missing}"):
        load_trainer(saved.path, AlgorithmConfig.model_validate(asked))
