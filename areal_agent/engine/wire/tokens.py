"""What an answer says of every token: its id, its log-probability, and the likeliest tokens in its place."""

from collections.abc import Sequence
from typing import Any, cast

from areal_agent.engine.fields import WireError, as_ids, as_integer, as_number
from areal_agent.types import TokenChunk, TopLogprobs


def encode_logprobs(chunk: TokenChunk) -> dict[str, Any]:
    """The fields of `meta_info` that have one entry a token."""
    fields: dict[str, Any] = {
        "output_token_logprobs": [
            (logprob, token_id, None) for logprob, token_id in zip(chunk.logprobs, chunk.token_ids, strict=True)
        ]
    }
    if chunk.top_logprobs:
        fields["output_top_logprobs"] = [
            [(logprob, token_id, None) for token_id, logprob in top] for top in chunk.top_logprobs
        ]
    return fields


def decode_tokens(ids: Sequence[Any], logprobs: Sequence[Any], tops: Sequence[Any]) -> TokenChunk:
    """Read ids and what belongs to them. `tops` is empty when nobody asked for the likeliest tokens."""
    token_ids = as_ids(ids, "output_ids")
    pairs = [(as_number(_field(entry, 0), "a log-probability"), _field(entry, 1)) for entry in logprobs]
    if tuple(token_id for _, token_id in pairs) != token_ids:
        raise WireError(f"output_token_logprobs has {len(pairs)} entries that do not match {len(token_ids)} output_ids")
    if tops and len(tops) != len(token_ids):
        raise WireError(f"output_top_logprobs has {len(tops)} entries for {len(token_ids)} output_ids")
    return TokenChunk(
        token_ids=token_ids,
        logprobs=tuple(logprob for logprob, _ in pairs),
        top_logprobs=tuple(_decode_top(top) for top in tops),
    )


def _decode_top(entries: object) -> TopLogprobs:
    """A token whose log-probability is null cannot be sampled (JSON has no minus infinity): it is left out."""
    if not isinstance(entries, list):
        raise WireError(f"output_top_logprobs holds {entries!r:.80}; it must hold a list for every token")
    return tuple(
        (as_integer(_field(entry, 1), "a token of output_top_logprobs"), as_number(_field(entry, 0), "its logprob"))
        for entry in cast(list[object], entries)
        if _field(entry, 0) is not None
    )


def _field(entry: object, index: int) -> object:
    if not isinstance(entry, list) or len(cast(list[object], entry)) < 2:
        raise WireError(f"a log-probability is {entry!r:.80}; it must be [log-probability, token id, ...]")
    return cast(list[object], entry)[index]
