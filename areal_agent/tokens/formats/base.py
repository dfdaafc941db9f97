"""The records of an answer, and what a family of formats for tool calls implements.

A family says by which texts its calls begin, reads one call from a `Cursor`, and writes calls. `AnswerReader` does the
rest: where calls may stand, what of a stream is held back, and what a malformed call becomes. So a family is some 80
lines. Formats with several calls in one block are families whose block begins by an opening, goes on by separators and
ends by an ending; formats in which JSON or code is the whole answer have bare openings.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from areal_agent.tokens.canonical import format_json
from areal_agent.tokens.formats.cursor import Cursor, MalformedCall
from areal_agent.types import JsonObject

BARE_NAME = re.compile(r"[\w.:/-]*")
"""The name of a tool where no quotes surround it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that the model asked for.

    >>> ToolCall(name="python", arguments={"code": "1"}).arguments_json
    '{"code": "1"}'
    """

    name: str
    arguments: JsonObject

    @property
    def arguments_json(self) -> str:
        """The arguments as text."""
        return format_json(self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAnswer:
    """An answer in its parts. `reasoning` is None when it did not think, "" when it thought nothing."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerDelta:
    """A piece of an answer as it leaves: some reasoning, some content, or one whole call.

    >>> AnswerDelta(call=ToolCall(name="f", arguments={}), call_index=1).content
    ''
    """

    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None
    call_index: int = 0  # the place of the call among those of the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The texts that surround the calls of a family. None of them is the beginning of another."""

    openings: tuple[str, ...]  # a call begins wherever one of these stands in the content
    closing: str  # the last characters of every call
    bare_openings: tuple[str, ...] = ()  # a call may begin with one at the head of the content; so may other text
    separators: tuple[str, ...] = ()  # behind a call: another one begins
    endings: tuple[str, ...] = ()  # behind a call: it was the last of its block


class PartialCall:
    """What has been read of one call. `only_tool`: a call of another tool is malformed.

    A family whose arguments are not JSON sets `arguments` and `has_arguments` itself.
    """

    def __init__(self, only_tool: str | None) -> None:
        self._only_tool = only_tool
        self.name: str | None = None
        self.arguments: JsonObject | None = None  # None, too, where the text is not strictly JSON
        self.has_arguments = False

    @property
    def has_begun(self) -> bool:
        """Whether this is a call beyond doubt, though it may be malformed."""
        return self.name is not None and self.has_arguments

    def set_name(self, name: str) -> None:
        if self.name is not None or not name or self._only_tool not in (None, name):
            raise MalformedCall
        self.name = name

    def read_arguments(self, cursor: Cursor) -> None:
        """Read the arguments as JSON; their `{` has been read."""
        if self.has_arguments:
            raise MalformedCall
        self.has_arguments = True
        self.arguments = cursor.read_object()

    def whole(self) -> ToolCall | None:
        """The call, when all of it has been read; None when it lacks its name or its arguments."""
        if self.name is None or self.arguments is None:
            return None
        return ToolCall(name=self.name, arguments=self.arguments)


class Family(Protocol):
    """One format of tool calls, or some that differ only in what is written."""

    @property
    def marks(self) -> Marks: ...

    def is_written_by(self, template: str) -> bool:
        """Whether a chat template, its comments taken out, writes the calls of earlier answers in this format."""
        ...

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        """Read one call whose opening (or separator) has been read, through its closing; raises MalformedCall.

        It is called again with a new `call`, from the same place, when the text at hand was too short.
        """
        ...

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Write an answer as the model would; `calls` is not empty."""
        ...

    def opening(self, tool_name: str | None) -> str:
        """The text that begins a call of this tool; None: of whichever tool the model names."""
        ...


# ----------------------------------------------- a call as one object, {"name": ..., "arguments": {...}}


def read_envelope(
    cursor: Cursor, call: PartialCall, *, argument_keys: tuple[str, ...], other_keys: tuple[str, ...] | None = None
) -> None:
    """Read the object whose `{` has been read, its keys in any order. `other_keys` may stand in it too; None: any."""
    separator = ","
    while separator == ",":
        key = cursor.read_string()
        cursor.expect(":")
        if key == "name":
            call.set_name(cursor.read_string())
        elif key in argument_keys:
            cursor.expect("{")
            call.read_arguments(cursor)
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
    """Write a call up to its arguments; the space before them is left to the model, whose tokens may hold both."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{argument_key}":'
