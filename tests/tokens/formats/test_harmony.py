"""The answers of gpt-oss, as messages in channels:

- reasoning, text and calls are in their channels, several of each; whether the end token is there does not matter
- a message to anybody but a function, or without JSON, stays text and is counted
- what is no message is text
- an answer can go on from text that somebody else wrote
"""

import pytest

from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ParsedAnswer, ToolCall
from areal_agent.tokens.formats.harmony import MAX_HEADER
from areal_agent.tokens.formats.thinking import ReasoningFormat

HARMONY = AnswerFormat(tool_format=ToolFormat.HARMONY, reasoning_format=ReasoningFormat.HARMONY)
THOUGHT, NEXT = "<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant"
PREAMBLE, FINAL = "<|channel|>commentary<|message|>I look.<|end|>", "<|channel|>final<|message|>Yes."
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALL = ToolCall(name="f", arguments={"x": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FINAL, ParsedAnswer(content="Yes.")),
        (f"{FINAL}<|return|>", ParsedAnswer(content="Yes.")),
        (f"{THOUGHT}{NEXT}{FINAL}", ParsedAnswer(content="Yes.", reasoning="Hm.")),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}", ParsedAnswer(content="Yes.", reasoning="Hm.\nHm.")),
        (f"{PREAMBLE}{NEXT}{FINAL}", ParsedAnswer(content="I look.\nYes.")),
        (f'{PREAMBLE}{NEXT}{TO_F}{{"x": 1}}', ParsedAnswer(content="I look.", tool_calls=(CALL,))),
        (f'{THOUGHT}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"x": 1}}<|call|>',
         ParsedAnswer(content="", reasoning="Hm.", tool_calls=(CALL,))),
        (f'{TO_F}{{"x": 1}}<|call|>{NEXT}{FINAL}', ParsedAnswer(content="Yes.", tool_calls=(CALL,))),
        ("Yes.", ParsedAnswer(content="Yes.")),
    ],
)  # fmt: skip
def test_the_parts_of_an_answer(text: str, said: ParsedAnswer) -> None:
    assert HARMONY.parse(text) == said


@pytest.mark.parametrize(
    ("text", "num_malformed"),
    [
        (TO_F + "x = 1<|call|>", 1),
        (TO_F + '{"x": 1} and more<|call|>', 1),
        (TO_F.replace("functions.f", "browser.open") + "{}<|call|>", 1),
        (TO_F.removesuffix("<|message|>"), 1),
        ("<|channel|>commentary to=" + "f" * MAX_HEADER + "<|message|>{}", 1),
        ("<|channel|>", 0),
    ],
)
def test_what_is_no_call_is_text(text: str, num_malformed: int) -> None:
    assert HARMONY.parse(text) == ParsedAnswer(content=text, num_malformed=num_malformed)


def test_an_answer_that_goes_on() -> None:
    assert HARMONY.opening_of_text("It is") == "<|channel|>final<|message|>It is"
    reader = HARMONY.reader()
    reader.go_on_after("It is")
    assert reader.finish(" so.<|return|>")[1] == ParsedAnswer(content="It is so.")
