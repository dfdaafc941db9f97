"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each with a channel and perhaps a recipient.

::

    <|channel|>analysis<|message|>Six sevens.<|end|><|start|>assistant<|channel|>commentary<|message|>I compute.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "6 * 7"}<|call|>

The prompt ends with `<|start|>assistant`. Messages in `analysis` are reasoning, one to a function is a call, all others
are content. A message to another recipient is a malformed call: models have built-in tools that nobody offers here.
"""

import re
from collections.abc import Callable, Sequence

from areal_agent.tokens.formats.base import Marks, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import Cursor, MalformedCall, MoreNeeded
from areal_agent.tokens.formats.reader import AnswerReader, Prose

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL = "<|end|>", "<|call|>"
_ENDS = (_END, _CALL, "<|return|>")
_FUNCTIONS = "functions."
_HEADER = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=(?P<first>[^\s<]+))?\s*"
    r"<\|channel\|>\s*(?P<channel>\w+)\s*(?:to=(?P<to>[^\s<]+))?\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
MAX_HEADER = 300
"""A longer text before `<|message|>` is no header."""


class Harmony:
    """The calls of an answer. They are messages of their own, which `HarmonyReader` finds."""

    marks = Marks(openings=(), closing="}")

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        """Read a message to a function after its header, the opening. The end token may not be part of the answer."""
        recipient = _recipient(opening.removesuffix(_MESSAGE))
        if not recipient.startswith(_FUNCTIONS):
            raise MalformedCall
        call.set_name(recipient.removeprefix(_FUNCTIONS))
        cursor.expect("{")
        call.read_arguments(cursor)
        if not cursor.accept(*_ENDS) and not cursor.is_at_end():
            raise MalformedCall

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Write the messages of an answer, the last one without its end token."""
        written = f"{_CALL}{_START}assistant".join(f"{self.opening(call.name)}{call.arguments_json}" for call in calls)
        return f"{_CHANNEL}commentary{_MESSAGE}{content}{_END}{_START}assistant{written}" if content else written

    def opening(self, tool_name: str | None) -> str:
        begin = f"{_CHANNEL}commentary to={_FUNCTIONS}"
        return begin if tool_name is None else f"{begin}{tool_name} {_CONSTRAIN}json{_MESSAGE}"


FINAL = f"{_CHANNEL}final{_MESSAGE}"
"""The header of an answer without calls."""


class HarmonyReader(AnswerReader):
    """Reads an answer message by message. What is no message of Harmony is content."""

    def _begin(self) -> Callable[[], None]:
        return self._read_header

    def go_on_after(self, content: str) -> None:
        super().go_on_after(content)
        self._step = self._read_body

    def _read_header(self) -> None:
        cursor = self._cursor
        if not cursor.peek(_START, _CHANNEL, "to="):
            self._step = self._read_content
            return
        begin = cursor.position
        header = self._next_header()
        channel = header is not None and _HEADER.fullmatch(header)
        if header is None or not channel:
            cursor.position = begin
            tag = cursor.accept(_START, _CHANNEL, "to=")
            rest = cursor.text[cursor.position : begin + MAX_HEADER] if header is None else header.removeprefix(tag)
            is_last_tag = _START not in rest and _CHANNEL not in rest  # else it is tried again from there
            self._num_malformed += is_last_tag and "to=" in tag + rest
            self._say(cursor.text[begin : cursor.position])
            self._step = self._read_content
        elif _recipient(header) and self._family:
            cursor.position, self._opening = begin, header.lstrip() + _MESSAGE
            self._step = self._read_call
        elif _recipient(header):  # no calls are wanted
            self._say(cursor.text[begin : cursor.position])
            self._step = self._read_body
        elif channel["channel"] == "analysis":
            self._reasoning = self._reasoning or Prose(keeps_edges=False)
            self._think("\n" if self._reasoning.text else "")
            self._step = self._read_reasoning
        else:
            self._say("\n" if self._content.text else "")
            self._step = self._read_body

    def _next_header(self) -> str | None:
        """Read through `<|message|>`. Return what was before it, or None, without reading, if that is no header."""
        cursor, begin = self._cursor, self._cursor.position
        try:
            header, _ = cursor.until(_MESSAGE)
        except MalformedCall:
            header = None
        except MoreNeeded:
            if len(cursor.text) - begin < MAX_HEADER + len(_MESSAGE):
                raise
            header = None
        if header is None or len(header) > MAX_HEADER:
            cursor.position = begin
            return None
        return header

    def _read_reasoning(self) -> None:
        self._end_message(self._cursor.find((*_ENDS, _START), self._think))

    def _read_body(self) -> None:
        self._end_message(self._cursor.find((*_ENDS, _START), self._say))

    def _end_message(self, tag: str) -> None:
        if not tag:
            self._end_answer()
            return
        self._cursor.accept(*_ENDS)
        self._step = self._read_header

    def _read_content(self) -> None:
        """Read text that is in no message."""
        if self._cursor.find((_START, _CHANNEL), self._say):
            self._step = self._read_header
        else:
            self._end_answer()

    def _read_broken(self) -> None:
        if self._cursor.find((*_ENDS, _START), self._say):
            self._say(self._cursor.accept(*_ENDS))
            self._step = self._read_header
        else:
            self._end_answer()

    def _end_call(self) -> None:
        self._step = self._read_header


def _recipient(header: str) -> str:
    found = _HEADER.fullmatch(header)
    return (found["first"] or found["to"] or "") if found else ""
