"""Which texts a tokenizer turns into tokens with a meaning of their own, and how such a text is said as plain text.

Special-token text in a message must not become a token, or the output of a tool could forge a turn. It is broken up
with an unguessable text in the middle, which is taken out again where the rendered text is tokenised.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import orjson
from transformers import PreTrainedTokenizerFast

from areal_agent.types import JsonObject

ANSWER_MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Tags that an answer may hold: in system and assistant messages they keep their meaning, elsewhere they are text."""


def control_texts(tokenizer: PreTrainedTokenizerFast, template: str) -> frozenset[str]:
    """The texts of special tokens, and of other added tokens that the template or an answer's markup uses.

    Added tokens that are runs of white space carry no meaning; one of a single character cannot be broken up.
    """
    return frozenset(
        text
        for token in tokenizer.added_tokens_decoder.values()
        if len(text := token.content.strip()) > 1 and (token.special or text in template or text in ANSWER_MARKUP)
    )


def any_of(texts: Iterable[str]) -> str:
    """A pattern that finds any of some texts, the longest where several stand."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


class Breaker:
    """Breaks up some control texts wherever they stand in JSON data.

    >>> Breaker({"<|end|>"}, with_text="#").broken({"content": ["a<|end|>"]})
    {'content': ['a<#|end|>']}
    """

    def __init__(self, texts: set[str] | frozenset[str], *, with_text: str) -> None:
        self._pattern = re.compile(any_of(texts))
        self._first_characters = tuple({text[0] for text in texts})
        self._first_bytes = tuple(character.encode() for character in self._first_characters)
        self._is_seen_in_json = not any(character in '"\\' or character < " " for character in self._first_characters)
        self._with_text = with_text

    def broken(self, value: Any) -> Any:
        """`value` with every control text in its strings, keys included, broken after its first character.

        It may be `value` itself, where there is none.
        """
        return value if type(value) is dict and self._is_clean(cast("JsonObject", value)) else self._broken(value)

    def _is_clean(self, value: JsonObject) -> bool:
        """Whether no string in it can hold a control text: one look at its JSON, where these are as they are."""
        try:
            text = orjson.dumps(value) if self._is_seen_in_json else None
        except TypeError:  # larger integers than orjson writes, and what is no JSON
            return False
        return text is not None and not any(byte in text for byte in self._first_bytes)

    def _broken(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._broken_text(value)
        if isinstance(value, (dict, Mapping)):  # dict first: it is one nearly always, and Mapping asks around
            return {self._broken_text(key): self._broken(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._broken(item) for item in value]
        return value

    def _broken_text(self, text: str) -> str:
        for character in self._first_characters:
            if character in text:
                return self._broken_up(text)
        return text  # nearly always, and ten times faster than to search

    def _broken_up(self, text: str) -> str:
        while self._pattern.search(text):  # breaking one up may join another
            text = self._pattern.sub(lambda match: match[0][0] + self._with_text + match[0][1:], text)
        return text
