"""Properties of every format, for any text:

- the way in which a text is cut into chunks changes neither what leaves nor the final answer
- all that has left, put together, is the final answer, and the same as that of the whole text
- an answer that was cut off contains the calls that are complete
- nothing is lost: an answer without calls and reasoning is its text
- what is formatted is parsed back
- a forced call begins as the format writes it
- no call is made where none is wanted; arguments that nest too deep are malformed, or text
- a call inside another call's argument is never made, wherever the answer is cut off, also where that call is broken
"""

import contextlib
import re
from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from areal_agent.tokens.canonical import MAX_DEPTH
from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import AnswerDelta, ParsedAnswer, ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat

REASONING = {
    ToolFormat.HARMONY: ReasoningFormat.HARMONY,
    ToolFormat.SEED: ReasoningFormat.SEED,
    ToolFormat.GEMMA_4: ReasoningFormat.GEMMA,
}
FORMATS = [
    AnswerFormat(tool_format=one, reasoning_format=REASONING.get(one, ReasoningFormat.THINK))
    for one in ToolFormat
    if one is not ToolFormat.NONE
]
CALL = ToolCall(name="f", arguments={"x": "1"})
PIECES = sorted(  # what answers are made of: tags, words and marks
    {
        piece
        for one in FORMATS
        for piece in re.findall(r"<[^<>]+>|\[[A-Z_]+\]|```\w*|\w+|.", one.format("a", [CALL, CALL], reasoning="b"))
    }
    | {"[CALL_ID]", "<|python_tag|>", "<|channel|>final<|message|>", ' string="true">', "\\", ";"}
)
TYPED = {  # formats with bare values or keys: the arguments are called by their types
    ToolFormat.GEMMA_4,
    ToolFormat.FUNCTION_GEMMA,
    ToolFormat.LFM_2,
    ToolFormat.LLAMA_4,
    ToolFormat.QWEN_CODER,
    ToolFormat.GLM,
    ToolFormat.GLM_47,
    ToolFormat.MINIMAX,
    ToolFormat.SEED,
    ToolFormat.DEEPSEEK_V32,
    ToolFormat.DEEPSEEK_V4,
}
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")

formats = st.sampled_from(FORMATS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)
texts_or_tags = st.text() | st.sampled_from(PIECES)
names = st.from_regex(r"[\w.:/-]{1,8}", fullmatch=True)
any_calls = st.builds(
    ToolCall, name=names, arguments=st.dictionaries(st.text(), json_values | texts_or_tags, max_size=3)
)
by_type = {
    "string": texts_or_tags,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(json_values, max_size=2),
    "object": st.dictionaries(st.text(), json_values, max_size=2),
}
plain_names = st.from_regex(r"\w{1,8}", fullmatch=True)
typed_calls = st.builds(ToolCall, name=plain_names, arguments=st.fixed_dictionaries({}, optional=by_type))


def calls_of(answer_format: AnswerFormat) -> st.SearchStrategy[ToolCall]:
    return typed_calls if answer_format.tool_format in TYPED else any_calls


def tools_of(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Return tools that say the types of the calls' arguments."""
    parameters = {"properties": {name: {"type": name} for name in TYPES}}
    return [{"function": {"name": name, "parameters": parameters}} for name in {call.name for call in calls}]


def written(answer_format: AnswerFormat, *said: Any, **more: Any) -> str:
    """Write an answer, if the format can: bare text must not contain the tag that ends it."""
    try:
        return answer_format.format(*said, **more)
    except ValueError:
        reject()


# Text that no format treats as its own: no whole tag, no brace at the beginning, no white space at the ends.
words = st.text(alphabet="ab é<[", max_size=9).map(str.strip)
soups = st.lists(st.sampled_from(PIECES) | st.sampled_from([" ", "\n"]) | st.text(max_size=3), max_size=20).map("".join)


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """Draw a well-formed answer of some format, with a slice cut out or other text inserted."""
    answer_format = draw(formats)
    calls = draw(st.lists(calls_of(answer_format), max_size=3))
    text = written(answer_format, draw(words), calls, reasoning=draw(st.none() | words))
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


@given(answer_format=formats, content=words, data=st.data(), length=st.integers(0))
def test_a_truncated_answer_says_its_whole_calls(
    answer_format: AnswerFormat, content: str, data: st.DataObject, length: int
) -> None:
    tool_calls = data.draw(st.lists(calls_of(answer_format), min_size=1, max_size=3))
    text = written(answer_format, content, tool_calls)
    answer = answer_format.parse(text[: length % len(text)], tools=tools_of(tool_calls))
    assert list(answer.tool_calls) == tool_calls[: len(answer.tool_calls)]
    assert answer.num_malformed <= 1


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@given(inner=typed_calls, edges=st.tuples(st.text(max_size=3), st.text(max_size=3)), cut=st.integers(0))
def test_a_call_inside_an_argument_is_not_made(
    answer_format: AnswerFormat, inner: ToolCall, edges: tuple[str, str], cut: int
) -> None:
    nested = answer_format.opening("g").join(edges) if cut % 2 else written(answer_format, "", [inner]).join(edges)
    outer = ToolCall(name="f", arguments={"string": nested[: cut % len(nested) + 1]})
    with contextlib.suppress(ValueError):  # it has an end tag, which cannot be written in an argument
        text = answer_format.format("", [outer])
        assert answer_format.parse(text, tools=tools_of([outer])).tool_calls == (outer,)
        for end in range(0, len(text), 1 + len(text) // 20):
            assert set(map(str, answer_format.parse(text[:end], tools=tools_of([outer])).tool_calls)) <= {str(outer)}


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@pytest.mark.parametrize("edge", ["", "\n", ' "said" '])
def test_a_call_inside_a_broken_call_is_not_made(answer_format: AnswerFormat, edge: str) -> None:
    is_harmony = answer_format.tool_format is ToolFormat.HARMONY  # in which a call's end token has no other meaning
    nested = answer_format.format("", [ToolCall(name="g", arguments={"string": "z"})] * (1 if is_harmony else 2))
    outer = ToolCall(name="f", arguments={"string": "HERE", "integer": 7})
    text = answer_format.format("", [outer]).replace("HERE", nested.join((edge, edge)))
    written_calls = {("f", str(outer.arguments | {"string": nested.join((edge, edge))}))}
    for end in (*range(0, len(text), 1 + len(text) // 30), len(text)):
        calls = answer_format.parse(text[:end], tools=tools_of([outer])).tool_calls
        assert {(call.name, str(call.arguments)) for call in calls} <= written_calls
    assert stream(answer_format, text)[1] == answer_format.parse(text)


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@given(data=st.data())
def test_nothing_is_a_call_where_none_is_wanted(answer_format: AnswerFormat, data: st.DataObject) -> None:
    call = data.draw(calls_of(answer_format))
    assume(answer_format.tool_format is not ToolFormat.HARMONY or "<|" not in str(call))  # there, a tag ends the text
    text = written(answer_format, "", [call])
    assert answer_format.parse(text, may_call_tools=False) == ParsedAnswer(content=text)


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, 3 * MAX_DEPTH])
def test_arguments_that_nest_too_deep(answer_format: AnswerFormat, depth: int) -> None:
    nested = reduce(lambda inner, _: [inner], range(depth), [])
    call = ToolCall(name="f", arguments={"array": nested[0]})
    answer = answer_format.parse(answer_format.format("", [call]), tools=tools_of([call]))
    if depth < MAX_DEPTH:
        assert answer.tool_calls == (call,)
    else:
        assert all(isinstance(one.arguments["array"], str) for one in answer.tool_calls)
        assert len(answer.tool_calls) + answer.num_malformed == 1


@given(answer_format=formats, text=texts)
def test_nothing_is_lost(answer_format: AnswerFormat, text: str) -> None:
    answer = answer_format.parse(text)
    if not answer.tool_calls and answer.reasoning is None and answer_format.tool_format is not ToolFormat.HARMONY:
        assert answer.content == text


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@given(content=words, data=st.data(), reasoning=st.none() | words)
def test_what_is_formatted_is_parsed_back(
    answer_format: AnswerFormat, content: str, data: st.DataObject, reasoning: str | None
) -> None:
    tool_calls = data.draw(st.lists(calls_of(answer_format), max_size=3))
    text = written(answer_format, content, tool_calls, reasoning=reasoning)
    said = ParsedAnswer(content=content, reasoning=reasoning, tool_calls=tuple(tool_calls))
    assert answer_format.parse(text, tools=tools_of(tool_calls)) == said
    assert stream(answer_format, text, tools=tools_of(tool_calls))[1] == said


@pytest.mark.parametrize("answer_format", FORMATS, ids=lambda one: one.tool_format)
@given(data=st.data())
def test_a_forced_call_begins_as_the_format_begins_it(answer_format: AnswerFormat, data: st.DataObject) -> None:
    call = data.draw(calls_of(answer_format))
    text = written(answer_format, "", [call])
    assert text.startswith(answer_format.opening(call.name))
    assert text.startswith(answer_format.opening(None))
