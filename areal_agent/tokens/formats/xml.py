"""Tool calls with a tag for each argument. Their values are bare text, whose type is in the tool's schema.

::

    <tool_call>                                          Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5
    <function=python>
    <parameter=code>
    print(6 * 7)
    </parameter>
    </function>
    </tool_call>

    <｜DSML｜function_calls>                              DeepSeek V3.2; V4 calls the block `tool_calls`
    <｜DSML｜invoke name="python">
    <｜DSML｜parameter name="code" string="true">print(6 * 7)</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

    <tool_call>python                                    GLM-4.5; 4.7 leaves out the line ends
    <arg_key>code</arg_key>
    <arg_value>print(6 * 7)</arg_value>
    </tool_call>

`Xml` is the reader and writer of them all; `QWEN_CODER`, `GLM` and the others say which tags they use. Where the next
argument begins before a value has ended, the value ends there, as in the engines' parsers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_agent.tokens.canonical import parse_json_value
from areal_agent.tokens.formats.base import BARE_NAME, Marks, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import SPACE, Cursor, MalformedCall
from areal_agent.tokens.formats.values import text_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Xml:
    """The tags of one format."""

    block: tuple[str, str] = ("", "")  # around one or several calls
    call: tuple[str, str, str]  # before the name, after it, and at the end
    key: tuple[str, str]  # around the name of an argument
    value: tuple[str, str]  # around its value; the first is empty where the value follows the name
    newline: str = "\n"  # written between tags
    before_block: str = "\n"  # written between content and calls
    is_shared: bool = False  # several calls are written in one block
    is_padded: bool = False  # a line end on either side of a value is not part of it
    writes_padding: bool = False
    may_be_json: bool = False  # all arguments may also be one JSON object

    @property
    def marks(self) -> Marks:
        begin, end = self.block
        if not begin:
            return Marks(openings=(self.call[0],), closing=self.call[2])
        return Marks(openings=(begin, self.call[0]), closing=self.call[2], separators=(self.call[0],), endings=(end,))

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening != self.call[0]:
            cursor.expect(self.call[0])
        cursor.take(SPACE)
        call.set_name(cursor.take(BARE_NAME))
        if self.call[1]:
            cursor.expect(self.call[1])
        if self.may_be_json and cursor.accept("{"):
            call.read_arguments(cursor)
            cursor.expect(self.call[2])
            return
        arguments: dict[str, Any] = {}
        while cursor.expect(self.key[0], self.call[2]) == self.key[0]:
            call.has_arguments = True
            key, _ = cursor.until(self.key[1])
            key = key.strip()
            arguments[key] = self._read_argument(cursor, call, key)
        call.set_arguments(arguments)

    def _read_argument(self, cursor: Cursor, call: PartialCall, key: str) -> Any:
        if self.value[0]:
            cursor.expect(self.value[0])
        return call.typed(key, self._read_value(cursor))

    def _read_value(self, cursor: Cursor) -> str:
        text, end = cursor.until(self.value[1], self.key[0])
        if end == self.key[0]:
            if self.call[0] in text or self.call[2] in text:  # this is another call's argument
                raise MalformedCall
            cursor.position -= len(end)
        return text.removeprefix("\n").removesuffix("\n") if self.is_padded else text

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        written = [self._write_call(call) for call in calls]
        if self.block[0]:
            groups = [self.newline.join(written)] if self.is_shared else written
            written = [self.newline.join((self.block[0], group, self.block[1])) for group in groups]
        return content + (self.before_block if content else "") + self.newline.join(written)

    def _write_call(self, call: ToolCall) -> str:
        arguments = (self._write_argument(key, value) for key, value in call.arguments.items())
        return self.newline.join((self._begin(call.name), *arguments, self.call[2]))

    def _write_argument(self, key: str, value: Any) -> str:
        text = text_of(value)
        if key != key.strip() or self.key[1] in key or self.value[1] in text or self.key[0] in text:
            raise ValueError(f"argument {key!r} contains a tag of the format, which cannot be escaped")
        edges = (text[:1], text[-1:])
        padding = "\n" if self.is_padded and (self.writes_padding or "\n" in edges) else ""
        joint = self.newline if self.value[0] else ""
        begin = self.key[0] + key + self.key[1] + joint + self._begin_value(value)
        return begin + padding + text + padding + self.value[1]

    def _begin_value(self, value: Any) -> str:
        del value
        return self.value[0]

    def opening(self, tool_name: str | None) -> str:
        block = self.block[0] + self.newline if self.block[0] else ""
        return block + (self.call[0] if tool_name is None else self._begin(tool_name))

    def _begin(self, name: str) -> str:
        return self.call[0] + name + self.call[1]


_IS_TEXT, _IS_JSON = ' string="true">', ' string="false">'


@dataclass(frozen=True, kw_only=True, slots=True)
class Dsml(Xml):
    """DeepSeek's format, whose tags say which values are text."""

    def _read_argument(self, cursor: Cursor, call: PartialCall, key: str) -> Any:
        kind = cursor.expect(_IS_TEXT.strip(), _IS_JSON.strip(), ">")
        text = self._read_value(cursor)
        parsed = None if kind == _IS_TEXT.strip() else parse_json_value(text)
        return parsed[0] if parsed else text

    def _begin_value(self, value: Any) -> str:
        return _IS_TEXT if isinstance(value, str) else _IS_JSON


_FUNCTION = ("<function=", ">", "</function>")
QWEN_CODER = Xml(
    block=("<tool_call>", "</tool_call>"),
    call=_FUNCTION,
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    is_padded=True,
    writes_padding=True,
)
SEED = replace(QWEN_CODER, block=("<seed:tool_call>", "</seed:tool_call>"), writes_padding=False)
GLM = Xml(
    call=("<tool_call>", "", "</tool_call>"), key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")
)
GLM_47 = replace(GLM, newline="")
MINIMAX = Xml(
    block=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=('<invoke name="', '">', "</invoke>"),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    is_shared=True,
)
DSML_V32 = Dsml(
    block=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    call=('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    key=('<｜DSML｜parameter name="', '"'),
    value=("", "</｜DSML｜parameter>"),
    before_block="\n\n",
    is_shared=True,
    may_be_json=True,
)
DSML_V4 = replace(DSML_V32, block=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
