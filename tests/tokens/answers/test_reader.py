"""An answer that is still coming:

- reasoning and content leave at once, but for what may begin a tag, and white space at an end
- a call leaves with its name as soon as that is certain, then with its arguments as they come
- what comes before the name is certain is held back, and is content if it proves to be no call
- arguments that come before the name leave with the whole call
- a call that breaks off after it has begun to leave stays a call, is counted, and ends with its closing tag
- the last bracket of the arguments leaves with the end of the call: without that the call is broken, and no JSON
- a call of another tool than the only one allowed is content
- the number of calls that are complete is known while the answer comes
"""

import pytest

from areal_agent.tokens.answers.answer_format import AnswerFormat
from areal_agent.tokens.answers.detection import ReasoningFormat, ToolFormat
from areal_agent.tokens.answers.parsed import AnswerDelta, ParsedAnswer, ToolCall
from areal_agent.tokens.answers.reader import AnswerReader

NAME = AnswerDelta(call_index=0, call_name="f")
HERMES = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.THINK)


def reader_of(tool_format: ToolFormat = ToolFormat.HERMES) -> AnswerReader:
    return AnswerFormat(tool_format=tool_format, reasoning_format=ReasoningFormat.THINK).reader()


def arguments(text: str, index: int = 0) -> AnswerDelta:
    return AnswerDelta(call_index=index, arguments=text)


def read(text: str, tool_format: ToolFormat = ToolFormat.HERMES) -> ParsedAnswer:
    reader = reader_of(tool_format)
    reader.feed(text)
    return reader.finish()[1]


def test_content_leaves_but_for_what_may_begin_a_tag() -> None:
    reader = reader_of()
    assert reader.feed("<") == ()
    assert reader.feed("b> yes") == (AnswerDelta(content="<b> yes"),)
    assert reader.feed(" <tool") == ()
    assert reader.feed("s>") == (AnswerDelta(content=" <tools>"),)
    assert reader.feed(" \n") == ()
    assert reader.finish()[0] == (AnswerDelta(content=" \n"),)


def test_reasoning_leaves_but_for_what_may_begin_a_tag() -> None:
    reader = reader_of()
    assert reader.feed("<think>\nHm") == (AnswerDelta(reasoning="Hm"),)
    assert reader.feed(", <") == (AnswerDelta(reasoning=","),)
    assert reader.feed("b>.\n</thi") == (AnswerDelta(reasoning=" <b>."),)
    assert reader.feed("nk>\n") == ()
    assert reader.feed("\nYes.") == (AnswerDelta(content="Yes."),)


def test_a_call_leaves_as_it_comes() -> None:
    reader = reader_of()
    assert reader.feed('So:\n<tool_call>{"name": "f') == (AnswerDelta(content="So:"),)
    assert reader.feed('", "arguments": ') == ()
    assert reader.feed('{"x"') == (NAME, arguments('{"x"'))
    assert reader.feed(': "a\\') == (arguments(': "a\\'),)
    assert reader.feed('"}"}') == (arguments('"}"'),)
    assert reader.feed("}</tool_call") == ()
    assert reader.feed(">") == (arguments("}"),)
    assert reader.finish() == (
        (),
        ParsedAnswer(content="So:", tool_calls=(ToolCall(name="f", arguments={"x": 'a"}'}),)),
    )


def test_each_call_has_its_index() -> None:
    reader = reader_of(ToolFormat.MISTRAL_V11)
    deltas = reader.feed("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}")
    assert deltas == (NAME, arguments("{}"), AnswerDelta(call_index=1, call_name="g"), arguments("{}", 1))


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f", "x": 1}</tool_call>', '<tool_call>{"name": "f", "argu'])
def test_what_proves_to_be_no_call_is_content(text: str) -> None:
    reader = reader_of()
    deltas = reader.feed(text[:25])
    assert deltas == ()
    assert (deltas := reader.feed(text[25:]) + reader.finish()[0])
    assert "".join(delta.content for delta in deltas) == text
    assert reader.finish()[1] == ParsedAnswer(content=text, num_malformed=1)


def test_json_that_is_no_call_leaves_as_soon_as_it_shows() -> None:
    reader = reader_of(ToolFormat.LLAMA3_JSON)
    assert reader.feed('{"name": "Ann", ') == ()
    assert reader.feed('"age":') == (AnswerDelta(content='{"name": "Ann", "age":'),)
    assert reader.feed(" 5") == (AnswerDelta(content=" 5"),)


def test_arguments_before_the_name_leave_with_the_whole_call() -> None:
    reader = reader_of()
    assert reader.feed('<tool_call>{"arguments": {"x": 1}, "name": "f"}') == ()
    assert reader.feed("</tool_call>") == (NAME, arguments('{"x": 1}'))


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ('<tool_call>{"name": "f", "arguments": {"x": "ab', '{"x": "ab'),
        ('<tool_call>{"name": "f", "arguments": {"x": "ab\\', '{"x": "ab\\'),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', '{"x": NaN'),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\d"}}</tool_call>', '{"x": "\\d"'),
        ('<tool_call>{"name": "f", "arguments": {"x": "say "hi""}}</tool_call>', '{"x": "say "hi""}}'),
    ],
)
def test_a_call_that_breaks_off_stays_a_call(text: str, broken: str) -> None:
    answer = read(text)
    assert answer == ParsedAnswer(content="", tool_calls=(ToolCall(name="f", arguments=broken),), num_malformed=1)
    assert answer.tool_calls[0].is_broken
    assert answer.tool_calls[0].arguments_json == broken


@pytest.mark.parametrize("tag", ["", "</tool_call>"])
def test_a_broken_call_ends_before_the_next(tag: str) -> None:
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    answer = read(f'<tool_call>{{"name": "f", "arguments": {{"x": oops oops{tag}{good} bye')
    calls = (ToolCall(name="f", arguments='{"x": oops oops'), ToolCall(name="g", arguments={}))
    assert answer == ParsedAnswer(content="bye", tool_calls=calls, num_malformed=1)


def test_the_tag_behind_the_last_call_is_read_after_a_broken_one() -> None:
    answer = read(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{x}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ToolFormat.DEEPSEEK_V31,
    )
    assert answer == ParsedAnswer(content="", tool_calls=(ToolCall(name="f", arguments="{x}"),), num_malformed=1)


@pytest.mark.parametrize(
    ("rest", "content"),
    [
        (", oops</tool_call> bye", "oops bye"),
        ("} so</tool_call> bye", "so bye"),
        ("}", ""),
        ("", ""),
        (', "arguments": {"y": 2}}</tool_call> bye', '"y": 2}} bye'),
    ],
)
def test_a_call_without_its_end_is_broken(rest: str, content: str) -> None:
    reader = reader_of()
    deltas = reader.feed('<tool_call>{"name": "f", "arguments": {"x": 1}' + rest)
    last, answer = reader.finish()
    calls = [delta for delta in deltas + last if delta.call_index is not None]
    assert calls == [NAME, arguments('{"x": 1')]
    assert answer == ParsedAnswer(
        content=content, tool_calls=(ToolCall(name="f", arguments='{"x": 1'),), num_malformed=1
    )


@pytest.mark.parametrize("are_calls_whole", [True, False])
def test_a_call_of_another_tool_is_content(are_calls_whole: bool) -> None:
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    reader = HERMES.reader(only_tool="f", are_calls_whole=are_calls_whole)
    assert reader.finish(text)[1] == ParsedAnswer(content=text, num_malformed=1)
    assert HERMES.reader(only_tool="g", are_calls_whole=are_calls_whole).finish(text)[1].content == ""


def test_complete_calls_are_counted_while_the_answer_comes() -> None:
    reader = reader_of()
    reader.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call')
    assert reader.num_calls == 0
    reader.feed(">")
    assert reader.num_calls == 1
