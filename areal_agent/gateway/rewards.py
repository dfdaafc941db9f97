"""What a session has earned so far: the final reward, those of single completions, and named parts for metrics."""

from collections.abc import Collection

from areal_agent.errors import RequestError
from areal_agent.gateway.control import RewardRequest
from areal_agent.types import Rewards


class RewardBook:
    """The rewards of one session; those that it has already, when they come late."""

    def __init__(self, rewards: Rewards | None = None) -> None:
        rewards = rewards or Rewards()
        self._final = rewards.final
        self._by_completion = dict(rewards.by_completion)
        self._parts = dict(rewards.parts)

    def take(self, request: RewardRequest, completion_ids: Collection[str]) -> None:
        """Take a reward; said twice, the later one counts. `completion_ids`: those that can be rewarded."""
        if request.completion_id is not None and request.completion_id not in completion_ids:
            raise RequestError(
                f"this session has no completion {request.completion_id!r}; use the id of a chat completion of this "
                "session (with n > 1: that id and '-0', '-1' ...)",
                param="interaction_id",
                code="interaction_not_found",
            )
        if request.name is not None:
            self._parts[request.name] = request.reward
        elif request.completion_id is not None:
            self._by_completion[request.completion_id] = request.reward
        else:
            self._final = request.reward

    def rewards(self) -> Rewards:
        return Rewards(final=self._final, by_completion=dict(self._by_completion), parts=dict(self._parts))
