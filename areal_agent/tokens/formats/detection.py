"""Finds out how a chat template writes tool calls: a call is rendered, so that it can be read back.

Templates also differ in what they want to be given. Some concatenate the arguments as text, and some write calls only
where the content is null; `Manner` is the form that a template takes.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agent.errors import RequestError
from areal_agent.tokens.canonical import format_json
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.template import ChatTemplate
from areal_agent.types import JsonObject

PROBE = ToolCall(name="look_up", arguments={"word": "salamander", "number": 7})
"""The call that is rendered."""

_PROPERTIES = {"word": {"type": "string", "description": "A word."}, "number": {"type": "integer", "description": "1"}}
_FUNCTION: JsonObject = {
    "name": PROBE.name,
    "description": "Looks up a word.",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["word"]},
}
PROBE_TOOLS: tuple[JsonObject, ...] = ({"type": "function", "function": _FUNCTION},)
PROBE_IDS = ("abcdefghi", f"functions.{PROBE.name}:0")
"""Ids of calls: Mistral's templates want nine letters and digits; Kimi's write the id in the place of the name."""

_QUESTION: JsonObject = {"role": "user", "content": "Who lives in fire?"}
ANSWER, REASONING = "An axolotl.", "It is no newt."


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """The form in which a template wants the calls of earlier answers.

    >>> Manner(has_text_arguments=True, is_content_null=True).form({"content": "", "tool_calls": [
    ...     {"function": {"name": "f", "arguments": {}}}]})
    {'content': None, 'tool_calls': [{'function': {'name': 'f', 'arguments': '{}'}}]}
    """

    has_text_arguments: bool = False
    is_content_null: bool = False  # where an answer has calls and no content

    def form(self, message: JsonObject) -> JsonObject:
        """Return an answer with calls in this form."""
        calls = [self._call(call) for call in message["tool_calls"]]
        content = message["content"]
        content = None if self.is_content_null and not content else content
        return {**message, "content": content, "tool_calls": calls}

    def _call(self, call: JsonObject) -> JsonObject:
        function = call["function"]
        if not self.has_text_arguments or isinstance(function["arguments"], str):
            return call
        return {**call, "function": {**function, "arguments": format_json(function["arguments"])}}


def probe_call(id_: str) -> JsonObject:
    """Return the answer that makes the call, as a message."""
    function = {"name": PROBE.name, "arguments": PROBE.arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": id_, "type": "function", "function": function}]}


def probes(template: ChatTemplate) -> Iterator[tuple[str, Manner]]:
    """Yield the texts of answers in which the template writes the call, in each form that it does not refuse."""
    try:
        before = template.render([_QUESTION], PROBE_TOOLS)
    except RequestError:
        return
    for is_null, is_text, id_ in itertools.product((False, True), (False, True), PROBE_IDS):
        manner = Manner(has_text_arguments=is_text, is_content_null=is_null)
        called = manner.form(probe_call(id_))
        result: dict[str, Any] = {"role": "tool", "content": "x", "tool_call_id": id_, "name": PROBE.name}
        for messages in ([_QUESTION, called], [_QUESTION, called, result]):
            text = _rendered(template, messages)
            if text is None:
                continue
            after_question = text.rpartition(str(_QUESTION["content"]))[2]
            after_header = text[_num_common(before, text) :]
            yield from ((answer, manner) for answer in dict.fromkeys((after_header, after_question)))


def _num_common(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def thinking_options(is_on: bool) -> JsonObject:
    """Return the template options that turn thinking on or off, under the names that templates have for it."""
    return {"enable_thinking": is_on, "thinking": is_on}


def answer_with_reasoning(template: ChatTemplate) -> str:
    """Return the text of a conversation that ends with an answer that had reasoning."""
    answer = {"role": "assistant", "content": ANSWER, "reasoning_content": REASONING, "thinking": REASONING}
    return _rendered(template, [_QUESTION, answer], thinking_options(True)) or ""


def _rendered(template: ChatTemplate, messages: Sequence[JsonObject], options: JsonObject | None = None) -> str | None:
    try:
        return template.render(messages, PROBE_TOOLS, add_generation_prompt=False, options=options or {})
    except RequestError:
        return None
