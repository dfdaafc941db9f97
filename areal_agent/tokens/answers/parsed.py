"""The records of a read answer: what it says, and the pieces in which that leaves. Plain data."""

from dataclasses import dataclass

from areal_agent.tokens.canonical import format_json
from areal_agent.types import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that the model asked for.

    A call that broke off after its beginning had left has no object for its arguments, but the text that was sent.

    >>> ToolCall(name="python", arguments={"code": "1"}).arguments_json
    '{"code": "1"}'
    >>> ToolCall(name="python", arguments='{"code": "1').is_broken
    True
    """

    name: str
    arguments: JsonObject | str

    @property
    def is_broken(self) -> bool:
        return isinstance(self.arguments, str)

    @property
    def arguments_json(self) -> str:
        """The arguments as text; no JSON object if the call is broken."""
        return self.arguments if isinstance(self.arguments, str) else format_json(self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAnswer:
    """An answer in its parts. `reasoning` is None when it did not think, "" when it thought nothing."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerDelta:
    """A piece of an answer as it leaves: of the reasoning, of the content, or of one call.

    The first piece of a call has its name; the arguments of all its pieces, put together, are their text.
    """

    reasoning: str = ""
    content: str = ""
    call_index: int | None = None
    call_name: str | None = None
    arguments: str = ""
