"""Tool calls in an answer's text:

- calls become name and arguments, what stands around them becomes content
- an answer without calls is its content, to the last space
- a malformed call stays in the text and is counted; well-formed neighbours are taken
- integers keep all their digits; NaN, infinity, lone surrogates and endless nesting are malformed
- what is formatted is parsed back (property)
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.tokens.json_text import parse_json_object
from areal_agent.tokens.tool_calls import ToolCall, format_answer, parse_answer

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'


def test_calls_and_content_are_told_apart() -> None:
    answer = parse_answer(f"Let me see.\n{CALL}\n{CALL}")
    assert answer.content == "Let me see."
    assert answer.tool_calls == (ToolCall(name="python", arguments={"code": "print(1)"}),) * 2
    assert answer.num_malformed == 0


def test_text_without_calls_is_kept_to_the_last_space() -> None:
    assert parse_answer(" yes \n").content == " yes \n"


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 65 + "]" * 65 + "}}</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_stays_text_and_is_counted(block: str) -> None:
    answer = parse_answer(f"so: {block}")
    assert answer.content == f"so: {block}"
    assert answer.tool_calls == ()
    assert answer.num_malformed == 1


def test_a_good_call_beside_a_malformed_one_is_taken() -> None:
    answer = parse_answer(f"<tool_call>oops{CALL}")
    assert [call.name for call in answer.tool_calls] == ["python"]
    assert answer.content == "<tool_call>oops"
    assert answer.num_malformed == 1


def test_integers_keep_their_digits() -> None:
    number = 123456789012345678901234567890
    assert parse_json_object(f'{{"x": {number}}}') == {"x": number}
    assert ToolCall(name="f", arguments={"x": number}).arguments_json == f'{{"x": {number}}}'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)
tags = ("<tool_call>", "</tool_call>")
calls = st.builds(
    ToolCall, name=st.text(min_size=1), arguments=st.dictionaries(st.text(), json_values, max_size=3)
).filter(lambda call: not any(tag in call.name + call.arguments_json for tag in tags))


@given(content=st.text(alphabet="abc ", max_size=9), tool_calls=st.lists(calls, max_size=3))
def test_what_is_formatted_is_parsed_back(content: str, tool_calls: list[ToolCall]) -> None:
    answer = parse_answer(format_answer(content, tool_calls))
    assert answer.tool_calls == tuple(tool_calls)
    assert answer.content.strip() == content.strip()
    assert answer.num_malformed == 0
