"""A whole answer as nearly all are written, read by one look at each call: at a fraction of the reader's cost.

What is not so plain is left to the reader, which knows every case; this only ever says what that one would.
"""

import re
from collections.abc import Callable

from areal_agent.tokens.answers.hermes import BEGIN, END
from areal_agent.tokens.answers.parsed import ParsedAnswer, ToolCall
from areal_agent.tokens.answers.prose import Prose
from areal_agent.tokens.answers.reader import THINK_BEGIN, THINK_END
from areal_agent.tokens.canonical import is_unicode, json_object_at

_SPACE = " \t\n\r"  # as JSON has it
_UP_TO_ARGUMENTS = re.compile(r'~\{~"name"~:~"([^"\\\x00-\x1f]+)"~,~"arguments"~:~(?=\{)'.replace("~", f"[{_SPACE}]*"))
_BEHIND_THEM = re.compile(rf"~\}}~{END}".replace("~", f"[{_SPACE}]*"))


def read_at_once(
    text: str,
    *,
    has_thinking: bool,
    is_thinking: bool,
    only_tool: str | None,
    accepts: Callable[[ToolCall], bool],
) -> ParsedAnswer | None:
    """What an answer says whose calls are Hermes'; None when the reader must tell. The options are the reader's."""
    reasoning = None
    if has_thinking:
        reasoning, text = _without_thinking(text, is_thinking=is_thinking)
    before, *pieces = text.split(BEGIN)
    content, calls = Prose(keeps_edges=True), list[ToolCall]()
    content.add(before)
    for piece in pieces:
        call, behind = _call(piece)
        if call is None or only_tool not in (None, call.name) or not accepts(call):
            return None
        calls.append(call)
        content.keeps_edges = False
        content.add(behind)
    content.end()
    return ParsedAnswer(content=content.text, reasoning=reasoning, tool_calls=tuple(calls))


def _without_thinking(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """The reasoning, if there is any, and what follows it."""
    if not is_thinking:
        opened = text.lstrip(_SPACE)
        if not opened.startswith(THINK_BEGIN):
            return None, text
        text = opened.removeprefix(THINK_BEGIN)
    reasoning, _, text = text.partition(THINK_END)
    return reasoning.strip(), text.lstrip(_SPACE)


def _call(piece: str) -> tuple[ToolCall | None, str]:
    """The call at the beginning of a text, and what follows it."""
    head = _UP_TO_ARGUMENTS.match(piece)
    arguments = head and json_object_at(piece, head.end())
    tail = arguments and _BEHIND_THEM.match(piece, arguments[1])
    if not (head and arguments and tail and is_unicode(head[1])):
        return None, ""
    return ToolCall(name=head[1], arguments=arguments[0]), piece[tail.end() :]
