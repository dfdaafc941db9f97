"""The limits of what an engine can serve.

The client checks before it sends (an id outside the vocabulary kills a real SGLang server), the server before it runs.
"""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from areal_agent.errors import EngineRejected
from areal_agent.types import EngineInfo, GenerateRequest

MAX_TOP_LOGPROBS = 1000
"""The limit at each token: with a whole vocabulary of 150,000, 1,000 tokens would take 15 GB and crash the engine."""


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise EngineRejected for a request that an engine with this vocabulary and context cannot serve."""
    _check_ids(request.input_ids, info.vocab_size)
    _check_length(len(request.input_ids), request.sampling.max_tokens, info.max_context_tokens)
    _check_bias(request.sampling.logit_bias, info.vocab_size)
    _check_top_logprobs(request.num_top_logprobs, info.vocab_size)
    _check_grammar(request.sampling.grammar, has_grammar=info.has_grammar)


def _check_ids(input_ids: Sequence[int], vocab_size: int) -> None:
    if not len(input_ids):
        raise EngineRejected("input_ids is empty; a request needs at least one token to continue")
    if _largest_id(input_ids) < vocab_size:
        return
    position, token_id = next((i, id_) for i, id_ in enumerate(input_ids) if not 0 <= id_ < vocab_size)
    raise EngineRejected(
        f"input_ids[{position}] is {token_id}, outside the vocabulary of {vocab_size} ids; "
        "use the tokenizer of the model that the engine serves"
    )


def _largest_id(input_ids: Sequence[int]) -> float:
    """Return the largest id, or more than any vocabulary if one is negative.

    An array takes a third of the time of `min` and `max`.
    """
    try:
        packed = input_ids if isinstance(input_ids, array) else array("i", input_ids)
    except OverflowError:
        return math.inf
    return int(np.frombuffer(packed, dtype=np.uintc).max())


def _check_length(num_prompt_tokens: int, max_tokens: int, max_context_tokens: int) -> None:
    if num_prompt_tokens + max_tokens > max_context_tokens:
        raise EngineRejected(
            f"a prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} exceed the context of "
            f"{max_context_tokens} tokens; shorten the prompt, lower max_tokens (max_new_tokens), or raise "
            "engine.max_context_tokens (--max-context)"
        )


def _check_bias(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    for token_id, _ in logit_bias:
        if not 0 <= token_id < vocab_size:
            raise EngineRejected(
                f"logit_bias names the token id {token_id}, outside the vocabulary of {vocab_size} ids"
            )


def _check_top_logprobs(num_top_logprobs: int, vocab_size: int) -> None:
    most = min(vocab_size, MAX_TOP_LOGPROBS)
    if not 0 <= num_top_logprobs <= most:
        raise EngineRejected(
            f"the number of top log-probabilities is {num_top_logprobs}; it must be from 0 (off) to {most}, of "
            f"the {vocab_size} ids of the vocabulary"
        )


def _check_grammar(grammar: tuple[str, str] | None, *, has_grammar: bool) -> None:
    if grammar is not None and not has_grammar:
        name, text = grammar
        raise EngineRejected(
            f"{name} is {text!r:.80}, but this engine does not constrain answers to a grammar; "
            "leave it out, or use an engine that has one"
        )
