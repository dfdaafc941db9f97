"""Train steps with a teacher, on a real, tiny model.

- The gradient is that of the formula over plain forward passes of both models, at the rollouts' temperature; several
  minibatches take the student as it was at the start of the step.
- A batch whose rewards are all alike trains, and the student comes closer to its teacher. Mixed, both parts count.
- A server's scores, over the wire, train as a loaded teacher's do. A teacher with fewer ids is refused.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_agent.algorithms.advantages import token_advantages
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.errors import ConfigError
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from tests.trainer.conftest import VOCAB_SIZE, save_random_model
from tests.trainer.lab import GRADIENT_DESCENT, PLAIN, Lab


def taught_by(folder, **values):
    return AlgorithmConfig(teacher={"model": str(folder), **values.pop("teacher", {})}, **values)


def difference(student, teacher, record):
    """log p_teacher - log p_student of the loss tokens, by plain forward passes."""
    mask = torch.from_numpy(record.loss_mask)[1:]
    with torch.no_grad():
        return (teacher.logprobs(record) - student.logprobs(record))[mask]


def expected_gradient(model_folder, records, advantages):
    plain = Lab(model_folder)
    total = torch.zeros(())
    for record, of_record in zip(records, advantages, strict=True):
        mask = torch.from_numpy(record.loss_mask)[1:]
        logprobs = plain.logprobs(record)[mask]
        behavior = torch.from_numpy(record.behavior_logprobs)[1:][mask]
        total = total - ((logprobs.detach() - behavior).exp().clamp(max=5.0) * of_record * logprobs).sum()
    (total / sum(int(record.loss_mask.sum()) for record in records)).backward()
    return torch.cat([one.grad.flatten() for one in plain.policy.named_parameters().values()])


def test_the_gradient_is_that_of_the_formula(model_folder, teacher_folder, given):
    student, teacher = Lab(model_folder), Lab(teacher_folder)
    advantages = [difference(student, teacher, record) for record in given.records]
    lab = Lab(model_folder, algorithm=taught_by(teacher_folder))
    expected = expected_gradient(model_folder, given.records, advantages)
    metrics = lab.stepper.train(given)
    torch.testing.assert_close(lab.before - lab.weights(), expected, atol=2e-6, rtol=1e-4)
    assert metrics["distill_kl"] == pytest.approx(-float(torch.cat(advantages).mean()), rel=1e-4)
    assert metrics["seconds_teacher"] > 0


def test_mixed_both_parts_are_in_the_gradient(model_folder, teacher_folder, given):
    student, teacher = Lab(model_folder), Lab(teacher_folder)
    judged = [difference(student, teacher, record) for record in given.records]
    by_rewards = [
        one[torch.from_numpy(record.loss_mask)]
        for one, record in zip(token_advantages(given.records, PLAIN), given.records, strict=True)
    ]
    rms = float(torch.cat(judged).square().mean().sqrt()) + 1e-4
    advantages = [0.5 * d / rms + 2.0 * a for d, a in zip(judged, by_rewards, strict=True)]
    algorithm = taught_by(teacher_folder, teacher={"weight": 0.5, "reward_weight": 2.0})
    found = Lab(model_folder, algorithm=algorithm).gradient(given)
    torch.testing.assert_close(found, expected_gradient(model_folder, given.records, advantages), atol=5e-6, rtol=1e-4)


def test_minibatches_are_judged_as_the_step_begins(model_folder, teacher_folder, given):
    metrics = {
        count: Lab(
            model_folder, TrainerConfig(learning_rate=1e-2), taught_by(teacher_folder, minibatches=count)
        ).stepper.train(given)
        for count in (1, 3)
    }
    assert metrics[3]["num_updates"] == 3
    for name in ("distill_kl", "advantage_mean", "advantage_std"):
        assert metrics[3][name] == pytest.approx(metrics[1][name], rel=1e-5)


def test_rewards_that_are_all_alike_train_and_the_student_comes_closer(model_folder, teacher_folder, given):
    given = replace(given, rewards=dict.fromkeys(given.rewards, 1.0))
    given = replace(
        given, records=[replace(one, turn_rewards=np.array([0.0, 1.0], dtype=np.float32)) for one in given.records]
    )
    lab = Lab(model_folder, TrainerConfig(learning_rate=2e-3), taught_by(teacher_folder))
    first = lab.stepper.train(given)
    assert (first["flat_group_fraction"], first["num_updates"]) == (1.0, 1)
    assert first["grad_norm"] > 0
    teacher = Lab(teacher_folder)
    before, after = (
        torch.cat([difference(one, teacher, record) for record in given.records]) for one in (Lab(model_folder), lab)
    )
    assert (before * (before - after)).sum() > 0, "towards tokens that the teacher likes, and away from the others"


async def test_scores_of_a_server_train_as_a_loaded_teacher_does(
    served, model_folder, teacher_folder, given, make_batch, tmp_path
):
    teacher = Lab(teacher_folder)
    scores = []
    for record in given.records:
        with torch.no_grad():
            scores.append(teacher.logprobs(record)[torch.from_numpy(record.loss_mask)[1:]].numpy())
    loaded = Lab(model_folder, algorithm=taught_by(teacher_folder)).stepper.train(given)
    client, _ = served
    algorithm = AlgorithmConfig(teacher={"url": "http://127.0.0.1:1"})
    setup = {"model": model_folder, "trainer": GRADIENT_DESCENT, "algorithm": algorithm, "seed": 0}
    await client.init(TrainerSetup(**setup, shared_memory=tmp_path))
    report = await client.train_step(make_batch(1, num_groups=1), teacher=scores)
    for name in ("distill_kl", "loss", "grad_norm", "advantage_min"):
        assert report.metrics[name] == pytest.approx(loaded[name], rel=1e-4)


def test_a_teacher_with_fewer_ids_is_refused(model_folder, open_trainer, tmp_path):
    small = save_random_model(tmp_path / "small", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(
        ConfigError, match=rf"knows {VOCAB_SIZE - 1} ids, and the policy may sample any of {VOCAB_SIZE}"
    ):
        open_trainer(model_folder, GRADIENT_DESCENT, taught_by(small), teacher=small)
