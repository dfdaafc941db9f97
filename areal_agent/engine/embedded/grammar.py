"""Constrains answers to a grammar with llguidance (the extra `grammar`): which tokens may come next.

A matcher follows one answer token by token. Without llguidance, or when it cannot read the model's fast tokenizer,
requests with a grammar are refused.
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
        """The tokens that may come next, `[V]`. Never none: where nothing can follow, the answer ends."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            told = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed[: len(told)] = told
        if not allowed.any():
            allowed[self._eos_token_ids] = True
        return allowed

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance by sampled tokens."""
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))

    def failure(self) -> EngineRejected | None:
        """The reason why the grammar cannot be followed any further (it has become too much work), or None."""
        return _refused("the grammar", self._matcher.get_error()) if self._matcher.is_error() else None


class Grammars:
    """Makes matchers for the tokenizer of one model."""

    def __init__(self, guidance: Any, tokenizer: Any, *, vocab_size: int) -> None:
        self._guidance = guidance
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, folder: Path, *, vocab_size: int, eos_token_ids: Set[int]) -> Self | None:
        """The grammars of a model folder; None, with the reason in the log, where there can be none."""
        tokenizer = folder / "tokenizer.json"
        if importlib.util.find_spec("llguidance") is None:
            logger.info("no grammars: install the extra, areal-agent[grammar]")
        elif not tokenizer.exists() or not eos_token_ids:
            logger.info("no grammars: %s has no tokenizer.json, or the model no end token", folder)
        else:
            guidance = importlib.import_module("llguidance")
            try:
                built = guidance.LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
            except Exception as error:  # a boundary: its errors share no type
                logger.warning("no grammars: llguidance does not read %s: %s", tokenizer, error)
                return None
            return cls(guidance, built, vocab_size=vocab_size)
        return None

    def matcher(self, kind: str, text: str) -> Matcher:
        """A matcher for answers that follow a `json_schema`, `regex` or `ebnf`. Raises EngineRejected for a bad one."""
        try:
            matcher = self._guidance.LLMatcher(self._tokenizer, self._guidance.grammar_from(kind, text), log_level=0)
        except ValueError as error:
            raise _refused(kind, str(error)) from None
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return Matcher(matcher, vocab_size=self._vocab_size, eos_token_ids=self._tokenizer.eos_tokens)


def _refused(kind: str, reason: str) -> EngineRejected:
    cause = reason.partition("\n")[0]  # the rest is the state of a parser
    return EngineRejected(f"{kind} cannot be followed: {cause[:300]}; correct or simplify it")
