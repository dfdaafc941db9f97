"""Tool calls inside an answer's text, in the Hermes form that Qwen and many others speak.

::

    Let me compute that.
    <tool_call>
    {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    </tool_call>

A call that is not of this form stays in the text, so that the agent sees what the model wrote, and is counted.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from areal_agent.tokens.json_text import format_json, parse_json_object
from areal_agent.types import JsonObject

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


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
        return format_json(self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAnswer:
    """An answer as content and tool calls."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


def parse_answer(text: str) -> ParsedAnswer:
    """Split an answer into content and tool calls.

    >>> parse_answer('Hm. <tool_call>{"name": "f", "arguments": {}}</tool_call>')
    ParsedAnswer(content='Hm.', tool_calls=(ToolCall(name='f', arguments={}),), num_malformed=0)
    >>> parse_answer('<tool_call>{"name": "f"').num_malformed
    1
    """
    if "<tool_call>" not in text:
        return ParsedAnswer(content=text)
    calls: list[ToolCall] = []
    num_malformed = 0

    def take(block: re.Match[str]) -> str:
        nonlocal num_malformed
        call = _parse_call(block[1]) if block[2] else None
        if call is None:
            num_malformed += 1
            return block[0]
        calls.append(call)
        return ""

    content = _BLOCK.sub(take, text)
    return ParsedAnswer(
        content=content.strip() if calls else text, tool_calls=tuple(calls), num_malformed=num_malformed
    )


def format_answer(content: str, tool_calls: Iterable[ToolCall]) -> str:
    """The text that `parse_answer` reads back: what a scripted model says.

    >>> format_answer("", [ToolCall(name="f", arguments={"x": 1})])
    '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    """
    blocks = (
        f'<tool_call>{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments_json}}}'
        "</tool_call>"
        for call in tool_calls
    )
    return content + "".join(blocks)


def _parse_call(text: str) -> ToolCall | None:
    call = parse_json_object(text)
    if call is None:
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    return ToolCall(name=name, arguments=arguments)
