"""The reasoning of an answer:

- the text between the tags at the beginning is reasoning; the white space around the tags is dropped
- if the prompt has opened it, the text up to the closing tag is reasoning
- reasoning that never closes extends to the end
- without tags at the beginning there is no reasoning; with nothing between them it is empty
- a call inside the reasoning is reasoning; one after it is a call, or content if it is malformed
- a model that does not think writes tags as text
"""

import pytest

from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ParsedAnswer, ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
PARSED_CALL = ToolCall(name="f", arguments={})
QWEN = AnswerFormat(tool_format=ToolFormat.QWEN, reasoning_format=ReasoningFormat.THINK)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\nSo.\n</think>\n\nYes. \n", "Hm.\nSo.", "Yes. \n"),
        ("\n<think>a</think>b", "a", "b"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<think>a\n", "a", ""),
        ("<think>a</thin", "a</thin", ""),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>", "", ""),
        (" Yes.", None, " Yes."),
        ("I <think> so</think>", None, "I <think> so</think>"),
        (" <thin", None, " <thin"),
    ],
)
def test_reasoning_stands_between_its_tags(text: str, reasoning: str | None, content: str) -> None:
    assert QWEN.parse(text) == ParsedAnswer(content=content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("\nHm.\n</think>\n\nYes.", "Hm.", "Yes."), ("Hm. ", "Hm.", ""), ("</think>Yes.", "", "Yes.")],
)
def test_the_prompt_may_have_opened_it(text: str, reasoning: str, content: str) -> None:
    assert QWEN.parse(text, is_thinking=True) == ParsedAnswer(content=content, reasoning=reasoning)


def test_a_call_inside_the_reasoning_is_reasoning() -> None:
    assert QWEN.parse(f"<think>{CALL}</think>\n{CALL}") == ParsedAnswer(
        content="", reasoning=CALL, tool_calls=(PARSED_CALL,)
    )


def test_a_malformed_call_behind_the_reasoning_stays_content() -> None:
    answer = QWEN.parse("<think>a</think>\n<tool_call>oops")
    assert answer == ParsedAnswer(content="<tool_call>oops", reasoning="a", num_malformed=1)


def test_reasoning_is_told_apart_where_no_calls_are_allowed() -> None:
    assert QWEN.parse(f"<think>a</think>{CALL}", may_call_tools=False) == ParsedAnswer(content=CALL, reasoning="a")


def test_a_forced_call_first_ends_open_reasoning() -> None:
    answer = QWEN.parse("\n</think>\n\n" + QWEN.opening("f") + " {}}\n</tool_call>", is_thinking=True)
    assert answer == ParsedAnswer(content="", reasoning="", tool_calls=(PARSED_CALL,))


def test_a_model_that_does_not_think_writes_text() -> None:
    plain = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
    text = "<think>a</think>b"
    assert plain.parse(text) == ParsedAnswer(content=text)
    with pytest.raises(ValueError, match="choose 'think'"):
        plain.format("b", reasoning="a")
