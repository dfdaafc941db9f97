"""The records of an answer, and what a family of tool-call formats implements.

A family names the texts that begin its calls, reads one call from a `Cursor`, and writes calls. `AnswerReader` does the
rest: where calls may stand, what of a stream is held back, and what happens to a malformed call. Where one block holds
several calls, the family's marks have separators and endings; where JSON is the whole answer, they have bare openings.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from areal_agent.tokens.canonical import format_json, is_deeper
from areal_agent.tokens.formats.cursor import Cursor, MalformedCall
from areal_agent.tokens.formats.values import ParameterTypes
from areal_agent.types import JsonObject, record

BARE_NAME = re.compile(r"[\w.:/-]*")
"""The name of a tool without quotes around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that the model made.

    >>> ToolCall(name="python", arguments={"code": "1"}).arguments_json
    '{"code": "1"}'
    """

    name: str
    arguments: JsonObject
    id: str | None = field(default=None, compare=False, repr=False)
    """The id that the model gave the call, where its format has one."""

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text."""
        return format_json(self.arguments)


@record
class ParsedAnswer:
    """The parts of an answer. `reasoning` is None when it did not think, "" when its reasoning is empty."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


CALL_ID_LENGTH = 9
"""Mistral's chat templates only accept tool call ids of nine letters and digits."""


def call_id(completion_id: str, index: int) -> str:
    """Return the id of a call as agents get it: no other call of the session has it.

    It is the same in a stream and in the record. A model that gives ids may give one twice.

    >>> call_id("chatcmpl-7", 0)
    '3dac58382'
    """
    return blake2b(f"{completion_id}/{index}".encode(), digest_size=CALL_ID_LENGTH).hexdigest()[:CALL_ID_LENGTH]


def call_form(call: ToolCall, id_: str) -> JsonObject:
    """Return a call as OpenAI writes it."""
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def answer_message(parsed: ParsedAnswer, content: str, completion_id: str) -> JsonObject:
    """Return an answer as OpenAI writes it, with this content."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["content"] = content or None
        message["tool_calls"] = [
            call_form(call, call_id(completion_id, index)) for index, call in enumerate(parsed.tool_calls)
        ]
    return message


@record
class AnswerDelta:
    """A piece of an answer as it leaves: some reasoning, some content, or one whole call.

    >>> AnswerDelta(call=ToolCall(name="f", arguments={}), call_index=1).content
    ''
    """

    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None
    call_index: int = 0  # the index of the call among those of the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The texts that surround the calls of a family. None of them is a prefix of another."""

    openings: tuple[str, ...]  # a call begins wherever one of these occurs in the content
    closing: str  # the last characters of every call
    bare_openings: tuple[str, ...] = ()  # at the start of the content these may begin a call, or other text
    separators: tuple[str, ...] = ()  # after a call: another one begins
    endings: tuple[str, ...] = ()  # after a call: it was the last of its block

    @property
    def nested(self) -> tuple[str, str]:
        """The tags before and after each call; empty where no tag ends a call."""
        return ((*self.openings, *self.separators)[-1], self.closing) if len(self.closing) > 1 else ("", "")


class PartialCall:
    """The parts of one call that have been read. `only_tool`: a call of another tool is malformed.

    A family whose arguments are not one JSON object sets them when it has read all.
    """

    def __init__(self, only_tool: str | None = None, types: ParameterTypes | None = None) -> None:
        self._only_tool = only_tool
        self._types = types or ParameterTypes()
        self.name: str | None = None
        self.id: str | None = None
        self.arguments: JsonObject | None = None  # also None if the text is not strict JSON
        self.has_arguments = False

    @property
    def has_begun(self) -> bool:
        """Return whether this is certainly a call, though it may be malformed."""
        return self.name is not None and self.has_arguments

    def set_name(self, name: str) -> None:
        if self.name is not None or not name or self._only_tool not in (None, name):
            raise MalformedCall
        self.name = name

    def read_arguments(self, cursor: Cursor) -> None:
        """Read the arguments as JSON, after their `{`."""
        if self.has_arguments:
            raise MalformedCall
        self.has_arguments = True
        self.arguments = cursor.read_object()

    def set_arguments(self, arguments: JsonObject) -> None:
        """Set all arguments. Those that nest too deep are not valid."""
        self.has_arguments, self.arguments = True, None if is_deeper(arguments) else arguments

    def typed(self, name: str, text: str) -> Any:
        """Return the value that bare text stands for as this argument of the named tool."""
        return self._types.value(self.name or "", name, text)

    def whole(self) -> ToolCall | None:
        """Return the call if it is complete, or None if it has no name or no valid arguments."""
        if self.name is None or self.arguments is None:
            return None
        return ToolCall(name=self.name, arguments=self.arguments, id=self.id)


class Family(Protocol):
    """One format of tool calls, or several that differ only in what is written."""

    @property
    def marks(self) -> Marks: ...

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        """Read one call, after its opening (or separator), through its closing. Raises MalformedCall.

        If the text at hand was too short, it is called again from the same place with a new `call`.
        """
        ...

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Write an answer as the model would. `calls` is not empty."""
        ...

    def opening(self, tool_name: str | None) -> str:
        """Return the text that begins a call of this tool, or, for None, of any tool that the model then names."""
        ...


# ----------------------------------------------- a call as one object, {"name": ..., "arguments": {...}}


def read_envelope(
    cursor: Cursor, call: PartialCall, *, argument_keys: tuple[str, ...], other_keys: tuple[str, ...] | None = None
) -> None:
    """Read an object, after its `{`, with its keys in any order; of other keys it may have `other_keys` (None: any)."""
    separator = ","
    while separator == ",":
        key = cursor.read_string()
        cursor.expect(":")
        if key == "name":
            call.set_name(cursor.read_string())
        elif key in argument_keys:
            cursor.expect("{")
            call.read_arguments(cursor)
        elif key == "id" and cursor.peek('"'):
            call.id = cursor.read_string()
        elif other_keys is None or key in other_keys:
            cursor.pass_value()
        else:
            raise MalformedCall
        separator = cursor.expect(",", "}")


def write_envelope(call: ToolCall, argument_key: str) -> str:
    """Write a call as the templates do.

    >>> write_envelope(ToolCall(name="f", arguments={"x": 1}), "arguments")
    '{"name": "f", "arguments": {"x": 1}}'
    """
    return f"{open_envelope(call.name, argument_key)} {call.arguments_json}}}"


def open_envelope(name: str, argument_key: str) -> str:
    """Write a call up to its arguments, without the space before them: one of the model's tokens may hold both."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{argument_key}":'
