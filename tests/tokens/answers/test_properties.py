"""Properties of every format, for whatever a model may write:

- how a text is cut into chunks does not show: not in what leaves, nor in what is told at the end
- what has left, put together, is what is told at the end, and what is told to be broken no reader of JSON takes
- where nothing is malformed, a stream says what the whole text says
- a whole text says what it says in one piece to a reader of whole calls
- nothing is lost: an answer without calls and reasoning is its text
- what is formatted is parsed back
- what begins a forced call is how the format begins it
"""

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.tokens.answers.answer_format import AnswerFormat
from areal_agent.tokens.answers.detection import ReasoningFormat, ToolFormat
from areal_agent.tokens.answers.parsed import AnswerDelta, ParsedAnswer, ToolCall
from areal_agent.tokens.canonical import parse_json_object

FORMATS = [
    AnswerFormat(tool_format=one, reasoning_format=ReasoningFormat.THINK)
    for one in ToolFormat
    if one is not ToolFormat.NONE
]
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "```json",
    "```",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "function",
    "f",
    '{"name":',
    '"f"',
    '"arguments":',
    '"parameters":',
    "{",
    "}",
    "{}",
    "[",
    "]",
    ",",
    ":",
    ";",
    '"',
    "\\",
    "1",
    '"x":',
]

formats = st.sampled_from(FORMATS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)
calls = st.builds(
    ToolCall,
    name=st.from_regex(r"[\w.:/-]{1,8}", fullmatch=True),
    arguments=st.dictionaries(st.text(), json_values | st.sampled_from(PIECES), max_size=3),
)
# What no format takes for its own: no whole tag, no brace at the beginning, no white space at the ends.
words = st.text(alphabet="ab é<[", max_size=9).map(str.strip)
soups = st.lists(st.sampled_from(PIECES) | st.sampled_from([" ", "\n"]) | st.text(max_size=3), max_size=20).map("".join)


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """A well-formed answer of some format from which a slice was cut, or into which something fell."""
    text = draw(formats).format(draw(words), draw(st.lists(calls, max_size=3)), reasoning=draw(st.none() | words))
    begin, length = draw(st.integers(0, len(text))), draw(st.integers(0, 5) | st.just(len(text)))
    return text[:begin] + draw(st.just("") | st.sampled_from(PIECES)) + text[begin + length :]


texts = soups | mangled()


def chunked(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def stream(
    answer_format: AnswerFormat, chunks: Iterable[str], **options: bool
) -> tuple[list[AnswerDelta], ParsedAnswer]:
    reader = answer_format.reader(**options)
    deltas = [delta for chunk in chunks for delta in reader.feed(chunk)]
    last, answer = reader.finish()
    return [*deltas, *last], answer


def joined(deltas: list[AnswerDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and name and arguments of each call, put together as a client does."""
    found: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.call_name is not None:
            assert delta.call_index == len(found)
            found.append((delta.call_name, ""))
        if delta.call_index is not None:
            name, arguments = found[delta.call_index]
            found[delta.call_index] = name, arguments + delta.arguments
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), found


@given(
    answer_format=formats,
    text=texts,
    cuts=st.lists(st.integers(0, 999), max_size=30),
    is_thinking=st.booleans(),
    may_call_tools=st.booleans(),
)
def test_how_a_text_is_cut_does_not_show(
    answer_format: AnswerFormat, text: str, cuts: list[int], is_thinking: bool, may_call_tools: bool
) -> None:
    options = {"is_thinking": is_thinking, "may_call_tools": may_call_tools}
    cut_deltas, cut_answer = stream(answer_format, chunked(text, cuts), **options)
    deltas, answer = stream(answer_format, [text], **options)
    assert joined(cut_deltas) == joined(deltas)
    assert cut_answer == answer


@given(answer_format=formats, text=texts, is_thinking=st.booleans())
def test_what_has_left_is_what_is_told_at_the_end(answer_format: AnswerFormat, text: str, is_thinking: bool) -> None:
    deltas, answer = stream(answer_format, text, is_thinking=is_thinking)
    reasoning, content, sent_calls = joined(deltas)
    assert (reasoning, content) == (answer.reasoning or "", answer.content)
    told = [(call.name, call.arguments) for call in answer.tool_calls]
    assert told == [(name, text if (sent := parse_json_object(text)) is None else sent) for name, text in sent_calls]
    assert sum(call.is_broken for call in answer.tool_calls) <= answer.num_malformed
    for call in answer.tool_calls:
        if call.is_broken:
            with pytest.raises(json.JSONDecodeError):
                json.loads(call.arguments_json)  # lenient: it takes NaN


@given(answer_format=formats, text=texts)
def test_where_nothing_is_malformed_a_stream_says_what_the_whole_text_says(
    answer_format: AnswerFormat, text: str
) -> None:
    whole = answer_format.parse(text)
    _, streamed = stream(answer_format, text)
    assert bool(whole.num_malformed) == bool(streamed.num_malformed)
    if not whole.num_malformed:
        assert streamed == whole


@given(answer_format=formats, text=texts, is_thinking=st.booleans(), only_tool=st.none() | st.just("f"))
def test_a_whole_text_says_what_a_reader_is_told_by_it(
    answer_format: AnswerFormat, text: str, is_thinking: bool, only_tool: str | None
) -> None:
    reader = answer_format.reader(is_thinking=is_thinking, are_calls_whole=True, only_tool=only_tool)
    assert answer_format.parse(text, is_thinking=is_thinking, only_tool=only_tool) == reader.finish(text)[1]


@given(answer_format=formats, text=texts)
def test_nothing_is_lost(answer_format: AnswerFormat, text: str) -> None:
    answer = answer_format.parse(text)
    assert not any(call.is_broken for call in answer.tool_calls)
    if not answer.tool_calls and answer.reasoning is None:
        assert answer.content == text


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@given(content=words, tool_calls=st.lists(calls, max_size=3), reasoning=st.none() | words)
def test_what_is_formatted_is_parsed_back(
    answer_format: AnswerFormat, content: str, tool_calls: list[ToolCall], reasoning: str | None
) -> None:
    text = answer_format.format(content, tool_calls, reasoning=reasoning)
    said = ParsedAnswer(content=content, reasoning=reasoning, tool_calls=tuple(tool_calls))
    assert answer_format.parse(text) == said
    assert stream(answer_format, text)[1] == said


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@given(call=calls)
def test_a_forced_call_begins_as_the_format_begins_it(answer_format: AnswerFormat, call: ToolCall) -> None:
    text = answer_format.format("", [call])
    assert text.startswith(answer_format.opening(call.name))
    assert text.startswith(answer_format.opening(None))
