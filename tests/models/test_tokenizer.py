"""The tiny model's tokenizer:

- any text survives encoding and decoding
- every digit is a token of its own, whatever stands beside it
- what the demonstrations say over and over is one token: a whole call is a dozen tokens and its digits
- the end of an answer and the start of a message are special tokens; tool call tags are not, so decoding keeps them
- text tokenised from a message's end on gives the ids that the whole conversation has there
- it loads from a folder with its template
"""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from areal_agent.models.tokenizer import ASSISTANT, END, Conversation, render, token_id

CALL = '<tool_call>{"name": "python", "arguments": {"code": "print((348 + 27) * 915)"}}</tool_call>'
FAILED = [
    {"role": "user", "content": "What is 348 * 27 + 915?"},
    {"role": "tool", "content": "NameError: name 'pront' is not defined"},
]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@given(text=st.text())
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


@given(before=st.text(max_size=5), digits=st.text("0123456789", min_size=1, max_size=8), after=st.text(max_size=5))
def test_a_digit_is_a_token(tokenizer: PreTrainedTokenizerFast, before: str, digits: str, after: str) -> None:
    ids = encode(tokenizer, before + digits + after)
    pieces = [tokenizer.decode([one]) for one in ids]
    assert all(len(piece) == 1 for piece in pieces if any(digit in piece for digit in "0123456789"))


def test_a_call_is_few_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    constant = 6  # tags, opening, two operators, closing
    assert len(encode(tokenizer, CALL)) == constant + len("34827915")


def test_the_opening_of_an_answer_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode([token_id(tokenizer, ASSISTANT)]) == ASSISTANT


def test_tags_survive_the_skipping_of_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode(encode(tokenizer, CALL + END), skip_special_tokens=True) == CALL


def test_the_end_token_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token_id == token_id(tokenizer, END)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_a_suffix_has_the_ids_that_the_whole_has(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> None:
    for conversation in [*conversations[:50], FAILED]:
        whole = render(conversation)
        for length in range(1, len(conversation)):
            prefix = render(conversation[:length])
            suffix = encode(tokenizer, whole.removeprefix(prefix))
            assert encode(tokenizer, whole) == encode(tokenizer, prefix) + suffix


def test_it_loads_from_a_folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded.chat_template == tokenizer.chat_template
    assert encode(loaded, render(FAILED)) == encode(tokenizer, render(FAILED))
