"""A cache of the ids of words, which tokenises most texts at a quarter of the tokenizer's cost.

A byte-level BPE cuts a text at its added tokens, then into words by a pattern, and merges within each word alone. So
the ids of a text are the ids of its words, and each word needs the tokenizer once. The cache serves only ASCII text,
for which Python's pattern and the tokenizer's mean the same. `WordCache.of` accepts only tokenizers that are known to
work this way, and a word is cached only if the pattern leaves it whole by itself. The rest goes to the tokenizer.

It stays because a turn of the gateway costs 12% more without it (benchmarks/gateway, S32 T16).
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Self, cast

import orjson
from tokenizers import Tokenizer

MAX_WORDS = 65_536
"""When the cache has this many words, about 10 MB, it is emptied."""

MAX_CHARACTERS = 64
"""Longer words are not cached, because they seldom come again."""

MAX_MERGED = 4096
"""A text with a longer word goes to the tokenizer: merging a megabyte here would hold the GIL for a second."""

NUM_LEARNT = 8192
"""The number of tokens whose words are cached when a tokenizer is loaded, which takes some 30 ms."""

_BYTE_LEVEL = {**{byte: 256 + byte for byte in range(33)}, 127: 289}
"""How a byte-level vocabulary writes invisible ASCII characters. It writes the visible ones as they are."""

_ASCII_OF_BYTE_LEVEL = {written: byte for byte, written in _BYTE_LEVEL.items()}
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_IN_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_ASCII_OF = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9"}


class WordCache:
    """Tokenises ASCII text word by word. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, words: re.Pattern[str], added: Sequence[re.Pattern[str]]) -> None:
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._words = words
        self._added = added
        self._ids: dict[str, Sequence[int]] = {}  # by word

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return a cache in front of a tokenizer, or None if its words may depend on their neighbours."""
        made_of: dict[str, Any] = orjson.loads(tokenizer.to_str())
        pattern = _pattern_of(made_of)
        added = cast("list[dict[str, Any]]", made_of["added_tokens"])
        if pattern is None or any(one["single_word"] or one["lstrip"] or one["rstrip"] for one in added):
            return None
        cache = cls(tokenizer, pattern, _in_order_of_search(added))
        cache._learn(made_of["model"]["vocab"], {one["content"] for one in added})
        return cache

    def ids_of(self, text: str) -> list[int] | None:
        """Return the ids of a text, or None if the tokenizer has to tokenise it."""
        if not text.isascii():
            return None
        token_ids: list[int] = []
        for piece, is_added in self._pieces(text):
            words = [piece] if is_added else self._words.findall(piece)
            if "".join(words) != piece:
                return None
            for word, cached in zip(words, map(self._ids.get, words), strict=True):
                known = cached or self._look_up(word, is_added=is_added)
                if known is None:
                    return None
                token_ids += known
        return token_ids

    def _learn(self, vocabulary: dict[str, int], added: set[str]) -> None:
        """Cache the commonest words, so that a process is fast from its first call.

        Added tokens may be in the vocabulary and be one word by the pattern. They are skipped: merging would give other
        ids.
        """
        oldest_first = sorted(vocabulary, key=vocabulary.__getitem__)  # a BPE learns what is common first
        for token in oldest_first[:NUM_LEARNT]:
            word = token.translate(_ASCII_OF_BYTE_LEVEL)
            if word.isascii() and word not in added:
                self._look_up(word, is_added=False)

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        """Cut a text at its added tokens. Return each piece and whether it is an added token."""
        pieces = [(text, False)]
        for added in self._added:
            pieces = [
                part for piece, is_added in pieces for part in ([(piece, True)] if is_added else _cut(piece, added))
            ]
        return pieces

    def _look_up(self, word: str, *, is_added: bool) -> Sequence[int] | None:
        if not is_added and (len(word) > MAX_MERGED or self._words.findall(word) != [word]):
            return None
        known = self._tokenizer.encode(word, add_special_tokens=False).ids if is_added else self._merged(word)
        if len(word) <= MAX_CHARACTERS:
            if len(self._ids) >= MAX_WORDS:
                self._ids.clear()
            self._ids[word] = known
        return known

    def _merged(self, word: str) -> Sequence[int]:
        """Merge a word by the BPE model directly, at a fifth of the cost of the whole tokenizer."""
        return [token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))]


def _in_order_of_search(added: Sequence[dict[str, Any]]) -> list[re.Pattern[str]]:
    """Return the patterns of added tokens in the order of a tokenizer's searches: raw text first, then normalised."""
    searches = [[one["content"] for one in added if one["normalized"] is late] for late in (False, True)]
    return [re.compile(f"({any_of(texts)})") for texts in searches if texts]


def any_of(texts: Iterable[str]) -> str:
    """Return a pattern that finds any of the texts, preferring the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


def _cut(text: str, added: re.Pattern[str]) -> list[tuple[str, bool]]:
    return [(part, index % 2 == 1) for index, part in enumerate(added.split(text))]


def _pattern_of(made_of: dict[str, Any]) -> re.Pattern[str] | None:
    """Return the pattern by which a tokenizer cuts ASCII text into words, or None if that is not certain."""
    normalizer, model = made_of["normalizer"], made_of["model"]
    if normalizer is not None and normalizer["type"] != "NFC":  # NFC leaves ASCII as it is
        return None
    if model["type"] != "BPE" or model["dropout"]:
        return None
    match made_of["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _ascii(_GPT2)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return _ascii(pattern)
        case _:
            return None


def _ascii(pattern: str) -> re.Pattern[str] | None:
    """Translate a tokenizer's pattern to Python's for ASCII text, or return None.

    Of Unicode's classes it understands letters and numbers.
    """
    inside = _IN_CLASS.sub(lambda found: _replaced(found[0], "{}"), pattern)
    translated = _replaced(inside, "[{}]")
    if re.search(r"\\[pPXRKGhH]|&&|\[\[|[*+?}]\+|\(\?[>|#<]", translated):
        return None
    try:
        compiled = re.compile(translated, re.ASCII)
    except re.error:
        return None
    return None if compiled.groups else compiled


def _replaced(text: str, form: str) -> str:
    for name, characters in _ASCII_OF.items():
        text = text.replace(name, form.format(characters))
    return text
