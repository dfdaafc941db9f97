"""Tool calls as Llama 3 writes them: JSON that is the whole answer, or stands behind its tag.

::

    {"name": "python", "parameters": {"code": "print(6 * 7)"}}; {"name": "python", "parameters": {"code": "1"}}
    Let me compute that.<|python_tag|>{"name": "python", "parameters": {"code": "print(6 * 7)"}}

Without the tag an answer that begins with `{` may also be JSON of the model's own; a key that no call has tells.
"""

from collections.abc import Sequence

from areal_agent.tokens.answers.call import OpenCall
from areal_agent.tokens.answers.dialect import Marks
from areal_agent.tokens.answers.envelope import open_envelope, read_envelope, write_envelope
from areal_agent.tokens.answers.parsed import ToolCall
from areal_agent.tokens.answers.tape import Steps, Tape

_TAG = "<|python_tag|>"
_PARAMETERS = "parameters"
_MARKS = Marks(openings=(_TAG,), bare_openings=("{",), separators=(";",))


class Llama3:
    """Arguments are called `parameters`; small models also say `arguments`, and add a `type`."""

    @property
    def marks(self) -> Marks:
        return _MARKS

    def read_call(self, tape: Tape, call: OpenCall, opening: str) -> Steps[None]:
        if opening != "{":
            yield from tape.expect("{")
        yield from read_envelope(tape, call, argument_keys=(_PARAMETERS, "arguments"), other_keys=("type", "id"))

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        text = "; ".join(write_envelope(call, _PARAMETERS) for call in calls)
        return f"{content}{_TAG}{text}" if content else text

    def opening(self, tool_name: str | None) -> str:
        return '{"name":' if tool_name is None else open_envelope(tool_name, _PARAMETERS)
