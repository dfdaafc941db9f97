"""What an evaluation found: each answer with the weights that gave it, and what they add up to. It runs nothing."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from areal_agent.types import Status, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalAnswer:
    """One rollout of an evaluation. `steps` are those of the weight versions that sampled its tokens, in order.

    More than one, when a push came while it was under way.
    """

    session_id: str
    task_id: str
    reward: float | None  # None: the rollout failed
    num_tokens: int
    steps: tuple[int, ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        return cls(
            session_id=trajectory.session_id,
            task_id=trajectory.task_id,
            reward=trajectory.rewards.total if trajectory.status is Status.COMPLETED else None,
            num_tokens=trajectory.num_sampled_tokens,
            steps=tuple(sorted(trajectory.sampled_steps())),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """An evaluation: `success` is the share of all tasks whose total reward reached `eval.success_reward`."""

    success: float
    reward_mean: float  # over the rollouts that have a reward
    num_tasks: int
    num_failed: int  # rollouts without a reward: they count as no success
    answers: tuple[EvalAnswer, ...]

    @classmethod
    def of(cls, answers: Sequence[EvalAnswer], success_reward: float) -> Self:
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        return cls(
            success=sum(reward >= success_reward for reward in rewards) / max(1, len(answers)),
            reward_mean=statistics.fmean(rewards) if rewards else 0.0,
            num_tasks=len(answers),
            num_failed=len(answers) - len(rewards),
            answers=tuple(answers),
        )

    def metrics(self) -> dict[str, Any]:
        """What metrics.jsonl has of it; `answers_at/<step>` counts answers by the oldest weights in them."""
        oldest = Counter(answer.steps[0] for answer in self.answers if answer.steps)
        return {
            "eval/success": self.success,
            "eval/reward_mean": self.reward_mean,
            "eval/num_tasks": self.num_tasks,
            "eval/num_failed": self.num_failed,
            "eval/tokens": sum(answer.num_tokens for answer in self.answers),
            "eval/spanning": sum(len(answer.steps) > 1 for answer in self.answers),
            **{f"eval/answers_at/{step}": number for step, number in sorted(oldest.items())},
        }
