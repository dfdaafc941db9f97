"""Tool calls as Mistral's models write them: a list until version 11 of their tokenizer, a tag for each call since.

::

    [TOOL_CALLS] [{"name": "python", "arguments": {"code": "print(6 * 7)"}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]python[ARGS]{"code": "print(6 * 7)"}
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.answers.call import OpenCall
from areal_agent.tokens.answers.dialect import Marks
from areal_agent.tokens.answers.envelope import BARE_NAME, open_envelope, read_arguments, read_envelope, write_envelope
from areal_agent.tokens.answers.parsed import ToolCall
from areal_agent.tokens.answers.tape import Steps, Tape

_TAG, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ARGUMENTS = "arguments"
_MARKS = Marks(openings=(_TAG,), separators=(",",), endings=("]",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistral:
    """Which of the two is written; both are read."""

    is_list: bool

    @property
    def marks(self) -> Marks:
        return _MARKS

    def read_call(self, tape: Tape, call: OpenCall, opening: str) -> Steps[None]:
        if opening == "," or (yield from tape.accept("[")):
            yield from tape.expect("{")
            yield from read_envelope(tape, call, argument_keys=(_ARGUMENTS,))
        else:
            yield from self._read_named(tape, call)

    def _read_named(self, tape: Tape, call: OpenCall) -> Steps[None]:
        call.set_name((yield from tape.run(BARE_NAME)))
        if (yield from tape.accept(_CALL_ID)):
            yield from tape.run(BARE_NAME)
        yield from tape.expect(_ARGS)
        yield from tape.expect("{")
        yield from read_arguments(tape, call)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if self.is_list:
            return f"{content}{_TAG} [{', '.join(write_envelope(call, _ARGUMENTS) for call in calls)}]"
        return content + "".join(f"{_TAG}{call.name}{_ARGS}{call.arguments_json}" for call in calls)

    def opening(self, tool_name: str | None) -> str:
        if tool_name is None:
            return _TAG
        return f"{_TAG} [{open_envelope(tool_name, _ARGUMENTS)}" if self.is_list else f"{_TAG}{tool_name}{_ARGS}"
