"""How the tiny model reads a conversation:

- the text of a conversation is a prefix of the text of every longer one, the opening of the answer in between
- an assistant message reads exactly as the model would write it: content, calls, end token
- what the model writes, parsed by the gateway and sent back by an agent, reads the same again
- content may be a string, a list of text parts, or absent
- tool definitions are not printed
"""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.models.tokenizer import render
from areal_agent.tokens.formats.answer_format import AnswerFormat, ReasoningFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall

HERMES = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
TEXT = st.text(max_size=12)
CALLS = st.builds(
    lambda name, code: {"id": "c", "function": {"name": name, "arguments": json.dumps({"code": code})}}, TEXT, TEXT
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": TEXT}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT, "tool_calls": st.lists(CALLS)}),
    ),
    min_size=1,
    max_size=6,
)
OPENING = "<|im_start|>assistant\n"


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "python", "arguments": arguments}}


@given(messages=MESSAGES)
def test_nothing_said_before_is_rewritten(messages: list[dict[str, Any]]) -> None:
    texts = [render(messages[:length]) for length in range(1, len(messages) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))


@given(messages=MESSAGES)
def test_an_answer_follows_its_opening(messages: list[dict[str, Any]]) -> None:
    answered = render([*messages, {"role": "assistant", "content": "yes"}])
    assert answered == render(messages) + OPENING + "yes<|im_end|>\n"


def test_a_generation_prompt_is_the_opening(tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == render(messages) + OPENING


def test_a_call_reads_as_hermes_writes_it() -> None:
    text = render([{"role": "assistant", "content": "Well.", "tool_calls": [call('{"code": "print(1)"}')]}])
    spoken = 'Well.<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'
    assert text == f"{OPENING}{spoken}<|im_end|>\n"


def test_arguments_as_an_object_read_like_their_json() -> None:
    as_object = render([{"role": "assistant", "content": "", "tool_calls": [call({"code": "é"})]}])
    as_json = render([{"role": "assistant", "content": "", "tool_calls": [call('{"code": "é"}')]}])
    assert as_object == as_json


@given(name=TEXT.filter(bool), code=TEXT)
def test_a_parsed_answer_reads_the_same_again(name: str, code: str) -> None:
    spoken = HERMES.format("", [ToolCall(name=name, arguments={"code": code})])
    (parsed,) = HERMES.parse(spoken).tool_calls
    function = {"name": parsed.name, "arguments": parsed.arguments_json}
    echoed = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    text = render([echoed])
    assert HERMES.parse(text.removeprefix(OPENING).removesuffix("<|im_end|>\n")) == HERMES.parse(spoken)


def test_what_the_demonstrations_say_reads_the_same_again() -> None:
    spoken = HERMES.format("", [ToolCall(name="python", arguments={"code": "print(348 * 27 + 915)"})])
    (parsed,) = HERMES.parse(spoken).tool_calls
    echoed = {"role": "assistant", "content": None, "tool_calls": [call(parsed.arguments_json)]}
    assert render([echoed]) == f"{OPENING}{spoken}<|im_end|>\n"


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 * 3?"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "What is 2 * 3?"}])


def test_content_may_be_absent() -> None:
    assert render([{"role": "assistant"}]) == f"{OPENING}<|im_end|>\n"


def test_tool_definitions_are_not_printed(tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == render(messages)
