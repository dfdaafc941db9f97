"""Properties of every format, for any text:

- the way in which a text is cut into chunks changes neither what leaves nor the final answer
- all that has left, put together, is the final answer, and the same as that of the whole text
- an answer that was cut off contains the calls that are complete
- nothing is lost: an answer without calls and reasoning is its text
- what is formatted is parsed back
- a forced call begins as the format writes it
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.tokens.formats.answer_format import AnswerFormat, ReasoningFormat, ToolFormat
from areal_agent.tokens.formats.base import AnswerDelta, ParsedAnswer, ToolCall

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
# Text that no format treats as its own: no whole tag, no brace at the beginning, no white space at the ends.
words = st.text(alphabet="ab é<[", max_size=9).map(str.strip)
soups = st.lists(st.sampled_from(PIECES) | st.sampled_from([" ", "\n"]) | st.text(max_size=3), max_size=20).map("".join)


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """Draw a well-formed answer of some format, with a slice cut out or other text inserted."""
    text = draw(formats).format(draw(words), draw(st.lists(calls, max_size=3)), reasoning=draw(st.none() | words))
    begin, length = draw(st.integers(0, len(text))), draw(st.integers(0, 5) | st.just(len(text)))
    return text[:begin] + draw(st.just("") | st.sampled_from(PIECES)) + text[begin + length :]


texts = soups | mangled()


def chunked(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def stream(
    answer_format: AnswerFormat, chunks: Iterable[str], **options: Any
) -> tuple[list[AnswerDelta], ParsedAnswer]:
    reader = answer_format.reader(**options)
    deltas = [delta for chunk in chunks for delta in reader.feed(chunk)]
    last, answer = reader.finish()
    return [*deltas, *last], answer


@given(
    answer_format=formats,
    text=texts,
    cuts=st.lists(st.integers(0, 999), max_size=30),
    is_thinking=st.booleans(),
    may_call_tools=st.booleans(),
    only_tool=st.none() | st.just("f"),
)
def test_a_stream_says_what_the_whole_text_says(
    answer_format: AnswerFormat, text: str, cuts: list[int], **options: Any
) -> None:
    deltas, answer = stream(answer_format, chunked(text, cuts), **options)
    assert answer == answer_format.parse(text, **options)
    assert "".join(delta.reasoning for delta in deltas) == (answer.reasoning or "")
    assert "".join(delta.content for delta in deltas) == answer.content
    calls = [(delta.call_index, delta.call) for delta in deltas if delta.call]
    assert calls == list(enumerate(answer.tool_calls))


@given(answer_format=formats, content=words, tool_calls=st.lists(calls, min_size=1, max_size=3), length=st.integers(0))
def test_a_truncated_answer_says_its_whole_calls(
    answer_format: AnswerFormat, content: str, tool_calls: list[ToolCall], length: int
) -> None:
    text = answer_format.format(content, tool_calls)
    answer = answer_format.parse(text[: length % len(text)])
    assert list(answer.tool_calls) == tool_calls[: len(answer.tool_calls)]
    assert answer.num_malformed <= 1


@given(answer_format=formats, text=texts)
def test_nothing_is_lost(answer_format: AnswerFormat, text: str) -> None:
    answer = answer_format.parse(text)
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
