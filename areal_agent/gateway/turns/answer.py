"""What one request gave: the answers to its prompts, and the figures of `usage`. It knows no JSON of an endpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_agent.gateway.turns.choice import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnAnswer:
    """The answers to one prompt."""

    prompt_ids: Sequence[int]
    choices: tuple[Choice, ...]
    num_cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answers to one request, in the order of its prompts."""

    turns: Sequence[TurnAnswer]

    @property
    def choices(self) -> list[Choice]:
        return [choice for turn in self.turns for choice in turn.choices]

    @property
    def completion_ids(self) -> list[str]:
        return [choice.completion.id for choice in self.choices]

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`. A prompt counts once, however many answers it has."""
        choices = self.choices
        num_prompt = sum(len(turn.prompt_ids) for turn in self.turns)
        num_sampled = sum(len(choice.completion.token_ids) for choice in choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": sum(turn.num_cached_tokens for turn in self.turns)},
        }
        if num_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage
