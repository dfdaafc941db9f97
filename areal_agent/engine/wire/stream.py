"""The answer of `/generate` in events, as it is sampled: lines `data: {...}`, and `data: [DONE]` after the last.

Every event says in `meta_info.completion_tokens` how many tokens there are so far. The embedded engine sends those
that are new, with their version spans; SGLang sends all of them every time. Which it is shows in the lengths, list by
list. The last event has the finish reason and the version spans of all tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from areal_agent.engine.fields import WireError, as_integer, as_object, decode_json, get
from areal_agent.engine.wire.generate import finished
from areal_agent.engine.wire.tokens import decode_tokens, encode_logprobs, top_entries
from areal_agent.engine.wire.versions import decode_new_spans, encode_spans
from areal_agent.engine_types import GenerateResult, TokenChunk, TopLogprobs
from areal_agent.types import JsonObject

STREAM_END = b"data: [DONE]\n\n"

_PREFIX = b"data:"
_END = b"[DONE]"


def encode_event(body: dict[str, Any]) -> bytes:
    """One event as it goes over the socket."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def encode_chunk(request_id: str, chunk: TokenChunk, *, num_tokens: int) -> dict[str, Any]:
    """An event in the middle; `num_tokens` are all so far, these included."""
    meta = {"id": request_id, "finish_reason": None, "completion_tokens": num_tokens, **encode_logprobs(chunk)}
    if chunk.versions:
        meta["weight_versions"] = encode_spans(chunk.versions, first=num_tokens - len(chunk.token_ids))
    return {"text": "", "output_ids": chunk.token_ids, "meta_info": meta}


def decode_event(data: bytes) -> JsonObject:
    """The object that one event holds."""
    return as_object(decode_json(data), "an event")


class EventSplitter:
    """Cuts bytes, which arrive in pieces of any size, into the data of events. Nothing limits the length of one."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of the line that has not ended

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that this piece completes; `[DONE]`, comments and empty lines are none."""
        first, *rest = piece.split(b"\n")
        self._pieces.append(first)
        if not rest:
            return []
        lines = [b"".join(self._pieces), *rest[:-1]]
        self._pieces = [rest[-1]]
        data = [line[len(_PREFIX) :].strip() for line in lines if line.startswith(_PREFIX)]
        return [event for event in data if event != _END]


class ResultReader:
    """Puts the events of one answer together. `result` is there after the last one."""

    def __init__(self) -> None:
        self.result: GenerateResult | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; the tokens in it that no event before had, perhaps none."""
        meta = as_object(get(fields, "meta_info", dict), "meta_info")
        chunk = self._new_tokens(fields, meta)
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs
        if meta.get("finish_reason") is not None:
            self.result = finished(self._all_tokens(), meta)
        return chunk

    def _new_tokens(self, fields: JsonObject, meta: JsonObject) -> TokenChunk:
        before = len(self._token_ids)
        after = as_integer(meta.get("completion_tokens"), "completion_tokens")
        tops = top_entries(meta)
        tokens = decode_tokens(
            _new_part(get(fields, "output_ids", list), before, after, "output_ids"),
            _new_part(get(meta, "output_token_logprobs", list), before, after, "output_token_logprobs"),
            _new_part(tops, before, after, "output_top_logprobs") if tops else [],
        )
        return replace(tokens, versions=decode_new_spans(meta, before, after))

    def _all_tokens(self) -> TokenChunk:
        return TokenChunk(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._top_logprobs),
        )


def _new_part(entries: Sequence[Any], num_before: int, num_after: int, name: str) -> Sequence[Any]:
    """What is new of entries that are either all so far or the new ones only."""
    if len(entries) == num_after >= num_before:
        return entries[num_before:]
    if len(entries) == num_after - num_before:
        return entries
    raise WireError(f"{name} has {len(entries)} entries in an event that takes {num_before} tokens to {num_after}")
