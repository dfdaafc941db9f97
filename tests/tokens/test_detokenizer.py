"""Token ids to text:

- the whole text is the tokenizer's, and streamed text is that: byte-level with broken UTF-8 included, and
  SentencePiece-like (property)
- text leaves with the token that completes a character
- the bytes of an id are exact; a token beyond the vocabulary has none; special tokens are known
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from areal_agent.tokens.renderer import Detokenizer

from .conftest import byte_level


def sentencepiece_like() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁", "world", "lo", "é", "<s>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = byte_level(
    ["hello wörld 🙂🙂 日本 hello wörld 🙂 日本"], vocab_size=320, special=("<|end|>", "<｜sep▁x｜>")
)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, sentencepiece_like()], ids=["byte level", "SentencePiece-like"])
@given(token_ids=st.lists(st.integers(0, 261), max_size=12))
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    stream = detokenizer.stream()
    streamed = "".join([*map(stream.feed, token_ids), stream.finish()])
    whole = detokenizer.text_of(token_ids)
    assert whole == tokenizer.decode(token_ids, skip_special_tokens=False)
    if tokenizer is BYTE_LEVEL or "\N{REPLACEMENT CHARACTER}" not in whole:
        assert streamed == whole


def test_text_leaves_with_the_token_that_completes_it() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    ids = [BYTE_LEVEL.token_to_id(token) for token in ("h", "Ã", "¶", "!")]
    stream = detokenizer.stream()
    assert [stream.feed(token_id) for token_id in ids] == ["h", "", "ö", "!"]


def test_bytes_are_exact() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.bytes_of(BYTE_LEVEL.token_to_id("Ã")) == b"\xc3"
    assert detokenizer.bytes_of(BYTE_LEVEL.token_to_id("<｜sep▁x｜>")) == "<｜sep▁x｜>".encode()
    assert detokenizer.bytes_of(100_000) == b""
    assert detokenizer.special_ids == {0, 1}


@given(st.text(max_size=20))
def test_the_bytes_of_a_text_are_those_of_its_ids(text: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(map(detokenizer.bytes_of, ids)).decode() == text
