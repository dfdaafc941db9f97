"""On-policy distillation by numbers worked out by hand, and against an enumeration of a small vocabulary.

- Differences are log p_teacher - log p_student, within 20 nats.
- Alone they are the advantage as they are; mixed, they are divided by their root mean square and rewards are added.
- In expectation the loss has the gradient of the reverse KL divergence, also for tokens of another behaviour policy.
- `distill_kl` is that divergence.

Settings that a teacher makes idle or meaningless are refused in test_config.py.
"""

import math

import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig, TeacherConfig
from areal_agent.algorithms.distillation import distill_metrics, distilled_advantages, teacher_differences
from areal_agent.algorithms.losses import LossTokens, choose_objective, policy_loss

LOADED = {"model": "folder"}


def test_differences_are_teacher_less_student_within_twenty_nats():
    teacher, student = torch.tensor([-1.0, -3.0, -90.0]), torch.tensor([-2.5, -1.0, -1.0])
    assert teacher_differences(teacher, student).tolist() == [1.5, -2.0, -20.0]


def test_alone_the_differences_are_weighted_and_nothing_else():
    found = distilled_advantages(
        [torch.tensor([1.5, -2.0]), torch.tensor([0.5])], None, TeacherConfig(**LOADED, weight=2.0)
    )
    assert [one.tolist() for one in found] == [[3.0, -4.0], [1.0]]


def test_mixed_each_part_is_normalised_by_itself_then_weighted_and_added():
    config = TeacherConfig(**LOADED, weight=0.5, reward_weight=2.0)
    differences, rewards = (
        [torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0])],
        [torch.tensor([1.0, 1.0]), -torch.ones(2)],
    )
    # rms: sqrt((9 + 1 + 1 + 1) / 4) = sqrt(3), plus 0.0001
    scale = 0.5 / (math.sqrt(3.0) + 1e-4)
    expected = [[3 * scale + 2, -scale + 2], [scale - 2, scale - 2]]
    found = distilled_advantages(differences, rewards, config)
    for one, wanted in zip(found, expected, strict=True):
        assert one.tolist() == pytest.approx(wanted, rel=1e-6)
    tenfold = distilled_advantages([10 * one for one in differences], rewards, config)
    assert torch.cat(tenfold).tolist() == pytest.approx(torch.cat(found).tolist(), rel=1e-3)


def test_where_both_agree_noise_is_not_blown_up():
    config = TeacherConfig(**LOADED, reward_weight=1.0)
    (found,) = distilled_advantages([torch.full((3,), 1e-7)], [torch.zeros(3)], config)
    assert found.abs().max() < 2e-3
    assert distilled_advantages([torch.zeros(0)], [torch.zeros(0)], config)[0].tolist() == []


@pytest.mark.parametrize("behavior_logits", [None, [0.9, -0.3, 0.0, 0.4, -0.8]])
def test_the_expected_gradient_is_that_of_the_reverse_divergence(behavior_logits):
    student = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.5, 0.7, 0.2, 1.1, -1.0], dtype=torch.float64).log_softmax(0)
    logprobs = student.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - teacher)).sum()  # KL(student || teacher) over the whole vocabulary
    (expected,) = torch.autograd.grad(exact, student, retain_graph=True)
    start = logprobs.detach()
    behavior = start if behavior_logits is None else torch.tensor(behavior_logits, dtype=torch.float64).log_softmax(0)
    config = AlgorithmConfig(teacher=LOADED, behavior_weight_high=100.0)
    (advantages,) = distilled_advantages([teacher_differences(teacher, start)], None, TeacherConfig(**LOADED))
    tokens = LossTokens(  # every token once, with the probability of being sampled as its weight
        logprobs=logprobs,
        entropy=torch.zeros(5, dtype=torch.float64),
        proximal=start,
        behavior=behavior,
        advantages=advantages,
        weights=behavior.exp(),
        sequences=torch.arange(5),
    )
    loss, _ = policy_loss(tokens, config, choose_objective(config))
    (found,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def test_the_metric_is_the_divergence_of_the_student_from_the_teacher():
    student, teacher = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    sampled = torch.tensor([0, 0, 1, 2])  # as often as the student samples them
    metrics = distill_metrics([teacher_differences(teacher.log(), student.log())[sampled]])
    assert metrics == {"distill_kl": pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))}
