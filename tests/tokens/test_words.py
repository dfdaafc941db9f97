"""Word by word gives the ids that the tokenizer gives: for its pattern, its added tokens and any ASCII text.

What is not certain to work so is left to the tokenizer.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from areal_agent.models.recipe import train_tokenizer
from areal_agent.tokens.words import MAX_MERGED, MAX_WORDS, WordCache
from tests.tokens.conftest import CORPUS, SPECIAL_TOKENS

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}]*[\p{Ll}]+|\s+"


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer, added: Sequence[AddedToken | str] = SPECIAL_TOKENS
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    tokenizer.add_tokens([one if isinstance(one, AddedToken) else AddedToken(one, normalized=False) for one in added])
    return tokenizer


def with_special_tokens_in_its_vocabulary() -> Tokenizer:
    """As the tiny model's: special tokens are of the vocabulary, and by the pattern each of them is one word."""
    return train_tokenizer([*CORPUS, "user 1\nAnd now?"], vocab_size=400).backend_tokenizer


def cache_of(tokenizer: Tokenizer) -> WordCache:
    cache = WordCache.of(tokenizer)
    assert cache is not None
    return cache


TOKENIZERS = {
    "gpt2": trained(GPT2),
    "qwen2": trained(split_by(QWEN2)),
    "llama3": trained(split_by(LLAMA3)),
    "tiny": with_special_tokens_in_its_vocabulary(),
}
CACHES = {name: cache_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}

OVERLAPPING = trained(
    GPT2,
    [
        AddedToken("<a>b", normalized=True),
        AddedToken("<a>", normalized=True),
        AddedToken("b<c>", normalized=False),
        AddedToken("<c>", normalized=False),
    ],
)
OVERLAPPING_CACHE = cache_of(OVERLAPPING)

ascii_text = st.text(st.characters(max_codepoint=127))
ODD = ("<|im_", "end|>", "'LL", "'s", " 's", "  ", "\n\n", " \n", "\t", "\r\n ", "1234567", "--")
odd_pieces = st.sampled_from([*SPECIAL_TOKENS, *CORPUS, *ODD])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(pieces=st.lists(ascii_text | odd_pieces))
def test_ids_are_the_tokenizers(name: str, pieces: list[str]) -> None:
    cache, text = CACHES[name], "".join(pieces)
    assert cache.ids_of(text) == TOKENIZERS[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_pair_and_triple_of_ascii_characters_of_each_class(name: str) -> None:
    cache = CACHES[name]
    marks = "aZ09 \t\n\r\x0b\x0c'.<|\x00\x1c\x7f"
    for text in (one + two + three for one in marks for two in marks for three in marks):
        assert cache.ids_of(text) == TOKENIZERS[name].encode(text, add_special_tokens=False).ids, repr(text)


@given(pieces=st.lists(st.sampled_from(["<a>", "b", "<c>", "<a>b", "b<c>", "<", ">", "<a><c>", " "])))
def test_added_tokens_that_overlap_are_found_in_the_tokenizers_order(pieces: list[str]) -> None:
    cache, text = OVERLAPPING_CACHE, "".join(pieces)
    assert cache.ids_of(text) == OVERLAPPING.encode(text, add_special_tokens=False).ids


def test_text_beyond_ascii_or_with_a_very_long_word_is_left_to_the_tokenizer() -> None:
    cache = CACHES["qwen2"]
    assert cache.ids_of("naïve") is None
    assert cache.ids_of("x" * MAX_MERGED) is not None
    assert cache.ids_of(" so " + "x" * (MAX_MERGED + 1)) is None


def test_more_words_than_are_kept() -> None:
    cache = cache_of(TOKENIZERS["gpt2"])
    for start in range(0, MAX_WORDS + 2000, 1000):
        text = " ".join(f"{number:x}g" for number in range(start, start + 1000))
        assert cache.ids_of(text) == TOKENIZERS["gpt2"].encode(text, add_special_tokens=False).ids


def test_nfc_changes_no_ascii() -> None:
    tokenizer = trained(split_by(QWEN2))
    tokenizer.normalizer = normalizers.NFC()
    assert WordCache.of(tokenizer) is not None


def test_what_is_not_certain_is_left_to_the_tokenizer() -> None:
    lowering = trained(GPT2)
    lowering.normalizer = normalizers.Lowercase()
    dropping = Tokenizer(models.BPE(dropout=0.1))
    dropping.pre_tokenizer = GPT2
    prefixed = trained(pre_tokenizers.ByteLevel(add_prefix_space=True))
    stripping = trained(GPT2, [AddedToken("<x>", lstrip=True, normalized=False)])
    cased = trained(split_by(CASED))
    unsplit = trained(pre_tokenizers.Metaspace())
    for tokenizer in (lowering, dropping, prefixed, stripping, cased, unsplit):
        assert WordCache.of(tokenizer) is None


def test_pattern_with_gaps_is_left_to_the_tokenizer() -> None:
    cache = cache_of(trained(split_by(r"\p{L}+")))
    assert cache.ids_of("ab") is not None
    assert cache.ids_of("a b") is None
