"""The formats Hermes and Qwen:

- calls become name and arguments, the text around them becomes content
- an answer without calls is its content, to the last space; so is one that may not call
- a malformed call stays in the text and is counted; well-formed neighbours are taken
- the keys of a call may be in any order, with others beside them
- a tag inside the arguments is text
- integers keep all their digits
"""

import pytest

from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ParsedAnswer, ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat

HERMES = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'


def test_calls_and_content_are_told_apart() -> None:
    answer = HERMES.parse(f"Let me see.\n{CALL}\n{CALL}")
    assert answer.content == "Let me see."
    assert answer.tool_calls == (ToolCall(name="python", arguments={"code": "print(1)"}),) * 2
    assert answer.num_malformed == 0


def test_text_around_calls_is_kept() -> None:
    assert HERMES.parse(f"a\n{CALL}\nb\n{CALL}\nc\n").content == "a\n\nb\n\nc"


@pytest.mark.parametrize("text", [" yes \n", "</tool_call>", "<tool_cal", "{}", ""])
def test_text_without_calls_is_kept_to_the_last_space(text: str) -> None:
    assert HERMES.parse(text) == ParsedAnswer(content=text)


def test_where_no_calls_are_allowed_all_is_content() -> None:
    assert HERMES.parse(CALL, may_call_tools=False) == ParsedAnswer(content=CALL)


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {}}, so</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1 "y": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": [1, ]}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\n"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\d"}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": True}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 65 + "]" * 65 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100_000,
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_stays_text_and_is_counted(block: str) -> None:
    assert HERMES.parse(f"so: {block}") == ParsedAnswer(content=f"so: {block}", num_malformed=1)


@pytest.mark.parametrize(
    "broken", ["<tool_call>oops", '<tool_call>{"name": "g", "arguments": {"x":}}</tool_call>', '<tool_call>{"name": 5}']
)
def test_a_good_call_beside_a_malformed_one_is_taken(broken: str) -> None:
    answer = HERMES.parse(f"{broken}\n{CALL}")
    assert [call.name for call in answer.tool_calls] == ["python"]
    assert answer.content == broken
    assert answer.num_malformed == 1


def test_keys_stand_in_any_order_with_others_beside_them() -> None:
    answer = HERMES.parse('<tool_call>{"id": [1, {"a": null}], "arguments": {"x": 1}, "name": "f"}</tool_call>')
    assert answer == ParsedAnswer(content="", tool_calls=(ToolCall(name="f", arguments={"x": 1}),))


def test_a_tag_inside_the_arguments_is_text() -> None:
    answer = HERMES.parse('<tool_call>{"name": "f", "arguments": {"x": "</tool_call><tool_call>"}}</tool_call>')
    assert answer.tool_calls == (ToolCall(name="f", arguments={"x": "</tool_call><tool_call>"}),)


def test_integers_keep_their_digits() -> None:
    number = 123456789012345678901234567890
    (call,) = HERMES.parse(f'<tool_call>{{"name": "f", "arguments": {{"x": {number}}}}}</tool_call>').tool_calls
    assert call.arguments_json == f'{{"x": {number}}}'
