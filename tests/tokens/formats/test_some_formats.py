"""The formats of Hermes, Llama 3, Mistral and DeepSeek; what is true of all formats is in test_properties.py:

- each way of writing calls is read: name, arguments in any order with others beside them, the content around them
- a malformed call stays in the text and is counted; well-formed neighbours are taken
- JSON that Llama writes without its tag, and that is not a call, is content and not counted
- without a format nothing is a call
"""

import pytest

from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ParsedAnswer, ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat

HERMES, LLAMA = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON
MISTRAL, DEEPSEEK = ToolFormat.MISTRAL, ToolFormat.DEEPSEEK
ONE = ToolCall(name="one", arguments={"x": 1})
TWO = ToolCall(name="two", arguments={})
CALL_ONE = '<tool_call>\n{"name": "one", "arguments": {"x": 1}}\n</tool_call>'
CALL_TWO = '<tool_call>\n{"name": "two", "arguments": {}}\n</tool_call>'
BEGIN, CALL, SEP, END, ENDS = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


def parse(tool_format: ToolFormat, text: str) -> ParsedAnswer:
    return AnswerFormat(tool_format=tool_format, reasoning_format=ReasoningFormat.NONE).parse(text)


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        (HERMES, f"a\n{CALL_TWO}\nb\n{CALL_TWO}\nc\n", "a\n\nb\n\nc", (TWO, TWO)),
        (HERMES, '<tool_call>{"id": [1, {"a": null}], "arguments": {"x": 1}, "name": "one"}</tool_call>', "", (ONE,)),
        (LLAMA, '{"name": "one", "parameters": {"x": 1}}', "", (ONE,)),
        (LLAMA, '\n {"type": "function", "name": "one", "arguments": {"x": 1}}\n', "", (ONE,)),
        (LLAMA, '{"name": "one", "parameters": {"x": 1}} ; {"name": "two", "parameters": {}}', "", (ONE, TWO)),
        (LLAMA, '<|python_tag|>{"name": "two", "parameters": {}}', "", (TWO,)),
        (LLAMA, 'So:\n<|python_tag|>{"name": "two", "parameters": {}}', "So:", (TWO,)),
        (LLAMA, 'So: {"name": "two", "parameters": {}}', 'So: {"name": "two", "parameters": {}}', ()),
        (LLAMA, '{"name": "two", "parameters": {}} is it', "is it", (TWO,)),
        (MISTRAL, '[TOOL_CALLS] [{"name": "one", "arguments": {"x": 1}}]', "", (ONE,)),
        (
            MISTRAL,
            'So:[TOOL_CALLS][{"name": "one", "arguments": {"x": 1}, "id": "a1B2c3D4e"},\n'
            '{"arguments": {}, "name": "two"}] well',
            "So: well",
            (ONE, TWO),
        ),
        (MISTRAL, '[TOOL_CALLS] [{"name": "two", "arguments": {}}', "", (TWO,)),
        (MISTRAL, '[TOOL_CALLS]one[ARGS]{"x": 1}[TOOL_CALLS]two[ARGS]{}', "", (ONE, TWO)),
        (MISTRAL, 'a [x][TOOL_CALLS]one[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}', "a [x]", (ONE,)),
        (DEEPSEEK, f'{BEGIN}{CALL}function{SEP}one\n```json\n{{"x": 1}}\n```{END}{ENDS}', "", (ONE,)),
        (
            DEEPSEEK,
            f'So:\n{BEGIN}{CALL}function{SEP}one\n```json\n{{"x": 1}}\n```{END}\n'
            f"{CALL}function{SEP}two\n```json\n{{}}\n```{END}{ENDS}\n",
            "So:",
            (ONE, TWO),
        ),
        (DEEPSEEK, f'{BEGIN}{CALL}one{SEP}{{"x": 1}}{END}{CALL}two{SEP}{{}}{END}{ENDS}', "", (ONE, TWO)),
        (DEEPSEEK, f"{CALL}two{SEP}{{}}{END}", "", (TWO,)),
    ],
)
def test_calls_are_read(tool_format: ToolFormat, text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert parse(tool_format, text) == ParsedAnswer(content=content, tool_calls=calls)


BROKEN = [
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
    '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100_000,
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        *((HERMES, f"so: {block}") for block in BROKEN),
        (LLAMA, '<|python_tag|>search.call(query="x")'),
        (LLAMA, '<|python_tag|>{"name": "f", "weather": {}}'),
        (LLAMA, '{"name": "f", "parameters": {"x": 1'),
        (LLAMA, '{"name": "f", "parameters": {"x": NaN}}'),
        (MISTRAL, "[TOOL_CALLS] none"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f"}]'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS][]"),
        (MISTRAL, "[TOOL_CALLS][ARGS]{}"),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": '),
        (DEEPSEEK, BEGIN),
        (DEEPSEEK, f"{BEGIN}{ENDS}"),
        (DEEPSEEK, f"{BEGIN}{CALL}f{SEP}{{}}{ENDS}"),
        (DEEPSEEK, f"{BEGIN}{CALL}{SEP}{{}}{END}{ENDS}"),
        (DEEPSEEK, f"{BEGIN}{CALL}tool{SEP}f\n```json\n{{}}\n```{END}{ENDS}"),
        (DEEPSEEK, f"{BEGIN}{CALL}function{SEP}f\n```json\n{{}}{END}{ENDS}"),
    ],
)
def test_a_malformed_call_stays_text_and_is_counted(tool_format: ToolFormat, text: str) -> None:
    assert parse(tool_format, text) == ParsedAnswer(content=text, num_malformed=1)


@pytest.mark.parametrize(
    ("tool_format", "text", "content"),
    [
        (HERMES, f"<tool_call>oops\n{CALL_ONE}", "<tool_call>oops"),
        (HERMES, f'<tool_call>{{"name": 5}}\n{CALL_ONE}', '<tool_call>{"name": 5}'),
        (LLAMA, '{"name": "one", "parameters": {"x": 1}}; {"name": 5}', '; {"name": 5}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": 5}][TOOL_CALLS]one[ARGS]{"x": 1}', '[TOOL_CALLS] [{"name": 5}]'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "one", "arguments": {"x": 1}}] [TOOL_CALLS] no', "[TOOL_CALLS] no"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "one", "arguments": {"x": 1}}, {"name": 5}]', ', {"name": 5}]'),
        (DEEPSEEK, f'{BEGIN}{CALL}two{SEP}[]{END}{CALL}one{SEP}{{"x": 1}}{END}{ENDS}', f"{BEGIN}{CALL}two{SEP}[]{END}"),
    ],
)
def test_a_good_call_beside_a_malformed_one_is_taken(tool_format: ToolFormat, text: str, content: str) -> None:
    assert parse(tool_format, text) == ParsedAnswer(content=content, tool_calls=(ONE,), num_malformed=1)


@pytest.mark.parametrize("text", ['{"answer": 4}', '{"name": "Ann", "age": 5}', '{"name": "Ann"}', "{x}", "{"])
def test_json_that_is_no_call_is_an_answer(text: str) -> None:
    assert parse(LLAMA, text) == ParsedAnswer(content=text)


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f", "arguments": {}}</tool_call>', "[TOOL_CALLS]f[ARGS]{}"])
def test_without_a_format_nothing_is_a_call(text: str) -> None:
    assert parse(ToolFormat.NONE, text) == ParsedAnswer(content=text)
