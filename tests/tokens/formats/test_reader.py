"""An answer that is still arriving:

- reasoning and content leave at once, except for what may begin a tag, and white space at an end
- a call leaves in one piece with its last character, each with its index
- a malformed call becomes content soon after its text breaks, or at the end of the answer, and is counted
- a long call that is held back is not read again with every token
- a call of another tool than the only one allowed is content, and so is one that is refused
"""

from dataclasses import replace

import pytest

from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import AnswerDelta, ParsedAnswer, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import Cursor
from areal_agent.tokens.formats.hermes import Hermes
from areal_agent.tokens.formats.reader import AnswerReader
from areal_agent.tokens.formats.thinking import ReasoningFormat

HERMES = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.THINK)
LLAMA = replace(HERMES, tool_format=ToolFormat.LLAMA3_JSON)
CALL = ToolCall(name="f", arguments={"x": 'a"}'})


def test_content_leaves_but_for_what_may_begin_a_tag() -> None:
    reader = HERMES.reader()
    assert reader.feed("<") == ()
    assert reader.feed("b> yes") == (AnswerDelta(content="<b> yes"),)
    assert reader.feed(" <tool") == ()
    assert reader.feed("s>") == (AnswerDelta(content=" <tools>"),)
    assert reader.feed(" \n") == ()
    assert reader.finish()[0] == (AnswerDelta(content=" \n"),)


def test_reasoning_leaves_but_for_what_may_begin_a_tag() -> None:
    reader = HERMES.reader()
    assert reader.feed("<think>\nHm") == (AnswerDelta(reasoning="Hm"),)
    assert reader.feed(", <") == (AnswerDelta(reasoning=","),)
    assert reader.feed("b>.\n</thi") == (AnswerDelta(reasoning=" <b>."),)
    assert reader.feed("nk>\n") == ()
    assert reader.feed("\nYes.") == (AnswerDelta(content="Yes."),)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (ToolFormat.HERMES, 'So:\n<tool_call>{"name": "f", "arguments": {"x": "a\\"}"}}</tool_call>'),
        (ToolFormat.HERMES, 'So:\n<tool_call>{"arguments": {"x": "a\\"}"}, "name": "f"}\n</tool_call>'),
        (ToolFormat.LLAMA3_JSON, 'So: <|python_tag|>{"name": "f", "parameters": {"x": "a\\"}"}}'),
        (ToolFormat.MISTRAL, 'So:[TOOL_CALLS] [{"name": "f", "arguments": {"x": "a\\"}"}}'),
        (ToolFormat.MISTRAL_V11, 'So:[TOOL_CALLS]f[ARGS]{"x": "a\\"}"}'),
        (
            ToolFormat.DEEPSEEK_V31,
            'So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "a\\"}"}<｜tool▁call▁end｜>',
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 5])
def test_a_call_leaves_in_one_piece_with_its_last_character(tool_format: ToolFormat, text: str, size: int) -> None:
    reader = replace(HERMES, tool_format=tool_format).reader()
    *before, last = [text[begin : begin + size] for begin in range(0, len(text), size)]
    deltas = [delta for chunk in before for delta in reader.feed(chunk)]
    assert "".join(delta.content for delta in deltas) == "So:"
    assert not reader.has_call
    assert reader.feed(last) == (AnswerDelta(call=CALL),)
    assert reader.has_call
    assert reader.finish() == ((), ParsedAnswer(content="So:", tool_calls=(CALL,)))


def test_json_that_is_no_call_leaves_soon_after_it_shows() -> None:
    reader, text = LLAMA.reader(), '{"name": "Ann", "age": 5, "likes": ["tea", "long walks", "sums"]}'
    num_shown = text.index(":", text.index("age"))
    for character in text[: 2 * num_shown]:
        reader.feed(character)
    assert reader.feed(text[2 * num_shown :]) == (AnswerDelta(content=text[2 * num_shown :]),)
    assert reader.finish()[1] == ParsedAnswer(content=text)


def test_a_long_call_is_not_read_again_with_every_token() -> None:
    class Counting(Hermes):
        num_reads = 0

        def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
            Counting.num_reads += 1
            super().read(cursor, call, opening)

    reader = AnswerReader(family=Counting(newline=""), thinking=None)
    for token in ["<tool_call>", '{"name": "f", "arguments": {"x": "', *["1234"] * 1000, '"}}', "</tool_call>"]:
        reader.feed(token)
    assert reader.has_call
    assert Counting.num_reads < 20


def test_a_good_call_behind_a_broken_one_leaves_with_its_end() -> None:
    reader = HERMES.reader()
    broken = '<tool_call>{"name": oops'
    good = '<tool_call>{"name": "f", "arguments": {"x": "a\\"}"}}</tool_call>'
    for character in f"{broken} {good}"[:-1]:
        reader.feed(character)
    assert not reader.has_call
    assert reader.feed(">")[-1] == AnswerDelta(call=CALL)
    assert reader.finish()[1] == ParsedAnswer(content=broken, tool_calls=(CALL,), num_malformed=1)


def test_a_call_that_is_not_allowed_is_content() -> None:
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    refused = ParsedAnswer(content=text, num_malformed=1)
    assert HERMES.reader(only_tool="f").finish(text)[1] == refused
    assert HERMES.reader(accepts=lambda call: call.name == "f").finish(text)[1] == refused
    assert HERMES.reader(only_tool="g", accepts=lambda call: call.name == "g").finish(text)[1].content == ""
