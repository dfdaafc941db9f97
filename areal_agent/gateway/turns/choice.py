"""One answer, whole: its tokens, and what they say."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from areal_agent.gateway.turns.draft import TokenRow
from areal_agent.tokens.answers.parsed import ParsedAnswer
from areal_agent.tokens.tree import Reply
from areal_agent.types import Completion, JsonObject

CALL_ID_LENGTH = 9
"""Mistral's templates take tool call ids of nine letters and digits, and no others."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An answer as its agent is told it. `rows` are for log-probabilities: empty where none are asked for."""

    index: int
    completion: Completion
    text: str  # all that it says: without its end token, without a stop text
    parsed: ParsedAnswer
    rows: tuple[TokenRow, ...] = ()
    num_reasoning_tokens: int = 0

    @property
    def finish_reason(self) -> str:
        """OpenAI's: an answer with a call ends for it, whatever came after the call."""
        has_call = any(not call.is_broken for call in self.parsed.tool_calls)
        return "tool_calls" if has_call else self.completion.finish_reason.value

    @property
    def message(self) -> JsonObject:
        """As a normalised message: what the next request is expected to repeat."""
        message: dict[str, object] = {
            "role": "assistant",
            "content": self.parsed.content,
            "tool_calls": [
                {
                    "id": call_id(self.completion.id, index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(self.parsed.tool_calls)
            ],
        }
        if self.parsed.reasoning is not None:
            message["reasoning_content"] = self.parsed.reasoning
        return message

    def reply(self, token_ids: Sequence[int]) -> Reply:
        """As the forest of turns keeps it, with its tokens."""
        return Reply(
            completion_id=self.completion.id,
            token_ids=token_ids,
            message=self.message,
            has_thinking=self.parsed.reasoning is not None,
        )


def call_id(completion_id: str, index: int) -> str:
    """The id of a call in a completion: the same in a stream and in its record.

    >>> call_id("chatcmpl-7", 0), call_id("chatcmpl-7", 1)
    ('3dac58382', 'bbc14577e')
    """
    return blake2b(f"{completion_id}/{index}".encode(), digest_size=CALL_ID_LENGTH).hexdigest()[:CALL_ID_LENGTH]


def completion_ids(answer_id: str, num_choices: int) -> tuple[str, ...]:
    """The ids of an answer's completions.

    >>> completion_ids("chatcmpl-7", 1), completion_ids("chatcmpl-7", 2)
    (('chatcmpl-7',), ('chatcmpl-7-0', 'chatcmpl-7-1'))
    """
    return (answer_id,) if num_choices == 1 else tuple(f"{answer_id}-{index}" for index in range(num_choices))
