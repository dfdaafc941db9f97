"""Answers that follow a grammar: which tokens may come next, by llguidance (the extra `grammar`).

A matcher belongs to one answer and follows it token by token. Without llguidance, or for a model whose folder has no
fast tokenizer that it reads, there is no grammar, and requests that ask for one are refused. It knows no batch and no
logits.
"""

import importlib
import importlib.util
import logging
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from areal_agent.errors import EngineRejected

logger = logging.getLogger(__name__)


class Matcher:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next, `[V]`: never none, for where nothing can follow the answer ends."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            told = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed[: len(told)] = told
        if not allowed.any():
            allowed[self._eos_token_ids] = True
        return allowed

    def follow(self, token_ids: Sequence[int]) -> None:
        """These tokens have been sampled."""
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))

    def failure(self) -> EngineRejected | None:
        """Why the answer cannot be held to its grammar any more: following it has become too much work."""
        return _refused("the grammar", self._matcher.get_error()) if self._matcher.is_error() else None


class Grammars:
    """Makes matchers for the tokenizer of one model."""

    def __init__(self, guidance: Any, tokenizer: Any, *, vocab_size: int) -> None:
        self._guidance = guidance
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, folder: Path, *, vocab_size: int, eos_token_ids: Set[int]) -> Self | None:
        """None where answers cannot be held to a grammar; the log says why."""
        tokenizer = folder / "tokenizer.json"
        if importlib.util.find_spec("llguidance") is None:
            logger.info("no grammars: install the extra, areal-agent[grammar]")
        elif not tokenizer.exists() or not eos_token_ids:
            logger.info("no grammars: %s has no tokenizer.json, or the model no end token", folder)
        else:
            guidance = importlib.import_module("llguidance")
            try:
                built = guidance.LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
            except Exception as error:  # a boundary: what it does not read is not told by type
                logger.warning("no grammars: llguidance does not read %s: %s", tokenizer, error)
                return None
            return cls(guidance, built, vocab_size=vocab_size)
        return None

    def matcher(self, kind: str, text: str) -> Matcher:
        """For answers that follow a `json_schema`, a `regex` or an `ebnf`. Raises EngineRejected where none can."""
        try:
            matcher = self._guidance.LLMatcher(self._tokenizer, self._guidance.grammar_from(kind, text), log_level=0)
        except ValueError as error:
            raise _refused(kind, str(error)) from None
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return Matcher(matcher, vocab_size=self._vocab_size, eos_token_ids=self._tokenizer.eos_tokens)


def _refused(kind: str, reason: str) -> EngineRejected:
    cause = reason.partition("\n")[0]  # what comes after it is the state of a parser
    return EngineRejected(f"{kind} cannot be followed: {cause[:300]}; correct or simplify it")
