"""The tiny model's tokenizer and chat template.

- Any text survives encoding and decoding; every digit is a token of its own.
- Text that the demonstrations repeat is one token: a whole call is a dozen tokens and its digits.
- The end of an answer and the start of a message are special tokens; tool call tags are not, so decoding keeps them.
- Text tokenised from a message's end on gives the ids that the whole conversation has there.
- The text of a conversation is a prefix of every longer one's; an assistant message reads as the model would write it.
- An answer, parsed by the gateway and sent back by an agent, reads the same again.
- Content may be a string, a list of text parts, or absent. Tool definitions are not printed.
"""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Tokenizer

from areal_agent.models.recipe import ASSISTANT, END, Conversation, render, token_id
from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat

CALL = '<tool_call>{"name": "python", "arguments": {"code": "print((348 + 27) * 915)"}}</tool_call>'
FAILED = [
    {"role": "user", "content": "What is 348 * 27 + 915?"},
    {"role": "tool", "content": "NameError: name 'pront' is not defined"},
]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@given(text=st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


@given(before=st.text(max_size=5), digits=st.text("0123456789", min_size=1, max_size=8), after=st.text(max_size=5))
def test_a_digit_is_a_token(tokenizer: Tokenizer, before: str, digits: str, after: str) -> None:
    ids = encode(tokenizer, before + digits + after)
    pieces = [tokenizer.decode([one]) for one in ids]
    assert all(len(piece) == 1 for piece in pieces if any(digit in piece for digit in "0123456789"))


def test_a_call_is_few_tokens(tokenizer: Tokenizer) -> None:
    constant = 6  # tags, opening, two operators, closing
    assert len(encode(tokenizer, CALL)) == constant + len("34827915")


def test_the_opening_and_the_end_of_an_answer_are_a_token_each(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([token_id(tokenizer, ASSISTANT)]) == ASSISTANT
    assert tokenizer.eos_token_id == token_id(tokenizer, END)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_tags_survive_the_skipping_of_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(encode(tokenizer, CALL + END), skip_special_tokens=True) == CALL


def test_a_suffix_has_the_ids_that_the_whole_has(tokenizer: Tokenizer, conversations: list[Conversation]) -> None:
    for conversation in [*conversations[:50], FAILED]:
        whole = render(conversation)
        for length in range(1, len(conversation)):
            prefix = render(conversation[:length])
            suffix = encode(tokenizer, whole.removeprefix(prefix))
            assert encode(tokenizer, whole) == encode(tokenizer, prefix) + suffix


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


def test_a_generation_prompt_is_the_opening_and_tool_definitions_are_not_printed(tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == render(messages)
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


def test_content_may_be_text_parts_or_absent() -> None:
    assert render([{"role": "assistant"}]) == f"{OPENING}<|im_end|>\n"
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 * 3?"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "What is 2 * 3?"}])
