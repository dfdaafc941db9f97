"""Tool calls as DeepSeek's models write them: with a code fence (V3, R1), or plain (since V3.1).

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python
    ```json
    {"code": "print(6 * 7)"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>{"code": "1"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.answers.call import OpenCall
from areal_agent.tokens.answers.dialect import Marks
from areal_agent.tokens.answers.envelope import BARE_NAME, read_arguments
from areal_agent.tokens.answers.parsed import ToolCall
from areal_agent.tokens.answers.tape import MalformedCall, Steps, Tape

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TYPE = "function"
_FENCE_BEGIN, _FENCE_END = "```json", "```"
_MARKS = Marks(openings=(_CALLS_BEGIN, _BEGIN), closings=(_END,), endings=(_CALLS_END,))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeek:
    """Which of the two is written; both are read."""

    is_fenced: bool

    @property
    def marks(self) -> Marks:
        return _MARKS

    def read_call(self, tape: Tape, call: OpenCall, opening: str) -> Steps[None]:
        if opening == _CALLS_BEGIN:
            yield from tape.expect(_BEGIN)
        name = yield from tape.run(BARE_NAME)
        yield from tape.expect(_SEP)
        if (yield from tape.accept("{")):
            call.set_name(name)
            yield from read_arguments(tape, call)
        else:
            yield from self._read_fenced(tape, call, name)
        yield from tape.expect(_END)

    def _read_fenced(self, tape: Tape, call: OpenCall, call_type: str) -> Steps[None]:
        if call_type != _TYPE:
            raise MalformedCall
        call.set_name((yield from tape.run(BARE_NAME)))
        yield from tape.expect(_FENCE_BEGIN)
        yield from tape.expect("{")
        yield from read_arguments(tape, call)
        yield from tape.expect(_FENCE_END)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        between = "\n" if self.is_fenced else ""
        return content + _CALLS_BEGIN + between.join(map(self._write_call, calls)) + _CALLS_END

    def _write_call(self, call: ToolCall) -> str:
        if self.is_fenced:
            return f"{self._begin(call.name)}\n{call.arguments_json}\n{_FENCE_END}{_END}"
        return f"{self._begin(call.name)}{call.arguments_json}{_END}"

    def opening(self, tool_name: str | None) -> str:
        if tool_name is None:
            return _CALLS_BEGIN + _BEGIN + (_TYPE + _SEP if self.is_fenced else "")
        return _CALLS_BEGIN + self._begin(tool_name)

    def _begin(self, name: str) -> str:
        return f"{_BEGIN}{_TYPE}{_SEP}{name}\n{_FENCE_BEGIN}" if self.is_fenced else f"{_BEGIN}{name}{_SEP}"
