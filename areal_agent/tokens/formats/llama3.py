"""Tool calls as Llama 3 writes them: JSON that is the whole answer, or follows a tag.

::

    {"name": "python", "parameters": {"code": "print(6 * 7)"}}; {"name": "python", "parameters": {"code": "1"}}
    Let me compute that.<|python_tag|>{"name": "python", "parameters": {"code": "print(6 * 7)"}}

Without the tag, an answer that begins with `{` may also be other JSON; a key that no call has shows this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.formats.base import Marks, PartialCall, ToolCall, open_envelope, read_envelope, write_envelope
from areal_agent.tokens.formats.cursor import Cursor

_TAG = "<|python_tag|>"
_PARAMETERS = "parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3:
    """Arguments are called `parameters`; small models also write `arguments`, and add a `type`."""

    marks = Marks(openings=(_TAG,), closing="}", bare_openings=("{",), separators=(";",))

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening != "{":
            cursor.expect("{")
        read_envelope(cursor, call, argument_keys=(_PARAMETERS, "arguments"), other_keys=("type", "id"))

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        text = "; ".join(write_envelope(call, _PARAMETERS) for call in calls)
        return f"{content}{_TAG}{text}" if content else text

    def opening(self, tool_name: str | None) -> str:
        return '{"name":' if tool_name is None else open_envelope(tool_name, _PARAMETERS)
