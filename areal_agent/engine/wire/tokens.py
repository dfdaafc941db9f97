"""What an answer says of every token: its id, its log-probability, and the likeliest tokens in its place."""

from collections.abc import Sequence
from typing import Any, cast

from areal_agent.engine.fields import WireError, as_ids, as_numbers, get
from areal_agent.engine_types import TokenChunk, TopLogprobs
from areal_agent.types import JsonObject


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


def top_entries(meta: JsonObject) -> list[Any]:
    """What `meta_info` says of the likeliest tokens; empty when nobody asked."""
    return [] if meta.get("output_top_logprobs") is None else get(meta, "output_top_logprobs", list)


def decode_tokens(ids: Sequence[Any], logprobs: Sequence[Any], tops: Sequence[Any]) -> TokenChunk:
    """Read ids and what belongs to them. `tops` is empty when nobody asked for the likeliest tokens."""
    token_ids = as_ids(ids, "output_ids")
    sampled_ids, sampled_logprobs = _columns(logprobs)
    if tuple(sampled_ids) != token_ids:
        raise WireError(
            f"output_token_logprobs has {len(sampled_ids)} entries that do not match {len(token_ids)} output_ids"
        )
    if tops and len(tops) != len(token_ids):
        raise WireError(f"output_top_logprobs has {len(tops)} entries for {len(token_ids)} output_ids")
    return TokenChunk(
        token_ids=token_ids,
        logprobs=as_numbers(sampled_logprobs, "a log-probability"),
        top_logprobs=tuple(_decode_top(top) for top in tops),
    )


def _decode_top(entries: object) -> TopLogprobs:
    """A token whose log-probability is null cannot be sampled (JSON has no minus infinity): it is left out."""
    if not isinstance(entries, list):
        raise WireError(f"output_top_logprobs holds {entries!r:.80}; it must hold a list for every token")
    token_ids, logprobs = _columns(cast("list[Any]", entries))
    possible = [(id_, logprob) for id_, logprob in zip(token_ids, logprobs, strict=True) if logprob is not None]
    return tuple(
        zip(
            as_ids([id_ for id_, _ in possible], "output_top_logprobs"),
            as_numbers([logprob for _, logprob in possible], "a log-probability"),
            strict=True,
        )
    )


def _columns(entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Token ids and log-probabilities of entries `[log-probability, token id, ...]`."""
    try:
        return [entry[1] for entry in entries], [entry[0] for entry in entries]
    except (TypeError, IndexError, KeyError):
        raise WireError(
            f"log-probabilities are {entries!r:.80}; each must be [log-probability, token id, ...]"
        ) from None
