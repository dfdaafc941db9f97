"""On-policy distillation: the policy's own answers, and for each of their tokens the judgement of a teacher.

    d_m = log p_teacher(y_m) - log p_student(y_m)        for a sampled token y_m, given all tokens before it

As an advantage, d has the gradient of the reverse KL divergence at each position, with the tokens before it as they
were sampled:

    E_{y ~ student}[d grad log p_student(y)] = -grad KL(student || teacher)

so the answers are the student's, unlike in supervised training on a teacher's texts (GKD, arXiv 2306.13649, with
lambda 1 and the reverse KL; Thinking Machines, "On-Policy Distillation", 2025). What a token does to later positions is
left out, which is a discount of 0. Pure functions over loss tokens, M of each record.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_agent.algorithms.advantages import STD_EPSILON
from areal_agent.algorithms.config import TeacherConfig
from areal_agent.algorithms.losses import MAX_LOG_RATIO


def teacher_differences(teacher: Tensor, student: Tensor) -> Tensor:
    """d = log p_teacher - log p_student of each token, in nats, within +-20: a token may be impossible for a teacher.

    `student` is the policy at the start of the step. Shapes: [M], [M] -> [M].
    """
    assert teacher.shape == student.shape, (teacher.shape, student.shape)
    return (teacher - student).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def distilled_advantages(
    differences: Sequence[Tensor], by_rewards: Sequence[Tensor] | None, config: TeacherConfig
) -> list[Tensor]:
    """The advantage of each loss token, from the teacher alone or mixed with rewards.

    Alone:  A = weight d. It fades as the student comes to agree.
    Mixed:  A = weight d / (rms(d) + STD_EPSILON) + reward_weight A_rewards, where rms(d)^2 is the mean of d^2 over the
    loss tokens of all records. A_rewards are normalised already, as `algorithm.advantage` says. d keeps its zero, so a
    token on which both agree is neither praised nor blamed.
    Shapes: [M] a record, and for A_rewards the same -> [M] a record.
    """
    if by_rewards is None:
        return [config.weight * one for one in differences]
    scale = float(torch.cat([torch.zeros(1), *differences]).square().sum() / max(sum(map(len, differences)), 1)) ** 0.5
    return [
        config.weight / (scale + STD_EPSILON) * difference + config.reward_weight * advantage
        for difference, advantage in zip(differences, by_rewards, strict=True)
    ]


def distill_metrics(differences: Sequence[Tensor]) -> dict[str, float]:
    """`distill_kl` estimates KL(student || teacher) in nats a token: the mean of -d over the loss tokens (k1)."""
    count = max(sum(map(len, differences)), 1)
    return {"distill_kl": -sum(float(one.double().sum()) for one in differences) / count}
