"""Reads the events of one answer of SGLang: those of the common wire, but for how an aborted answer ends.

The last event of an aborted answer names its last id once more, or all ids, or none, although the events before were
increments. Its log-probabilities say which: they hold either all tokens or the new ones, each with its id.
"""

from collections.abc import Sequence
from typing import Any

from areal_agent.engine import wire
from areal_agent.engine.fields import WireError, as_integer, as_object, get
from areal_agent.engine.foreign.unlabelled import label_meta
from areal_agent.engine.wire.generate import finished
from areal_agent.engine.wire.tokens import decode_tokens, top_entries
from areal_agent.engine_types import GenerateResult, TokenChunk, TopLogprobs
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable
from areal_agent.types import FinishReason, JsonObject


class SglangAnswer:
    """Puts the events of one answer together. `result` is there after the last one."""

    def __init__(self, *, takes_unlabelled: bool = False) -> None:
        """With `takes_unlabelled` weights that nobody has labelled are the first version."""
        self._takes_unlabelled = takes_unlabelled
        self.result: GenerateResult | None = None
        self._reader = wire.ResultReader()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; the tokens that are new, perhaps none.

        Raises WireError for what cannot be read, and an EngineError when the server says that it failed.
        """
        meta = as_object(get(fields, "meta_info", dict), "meta_info")
        if self._takes_unlabelled:
            meta = label_meta(meta)
            fields = {**fields, "meta_info": meta}
        finish = meta.get("finish_reason")
        if finish is not None and as_object(finish, "finish_reason").get("type") == FinishReason.ABORT:
            _raise_failure(as_object(finish, "finish_reason"))
            return self._read_abort(meta)
        chunk = self._reader.read(fields)
        self.result = self._reader.result
        return self._keep(chunk)

    def _read_abort(self, meta: JsonObject) -> TokenChunk:
        seen, after = len(self._token_ids), as_integer(meta.get("completion_tokens", 0), "completion_tokens")
        entries = _new_entries(meta.get("output_token_logprobs") or [], seen, after)
        tops = _new_entries(top_entries(meta), seen, after)
        chunk = self._keep(decode_tokens([_id_of(entry) for entry in entries], entries, tops))
        tokens = TokenChunk(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._top_logprobs),
        )
        spans = _cut(meta.get("weight_versions") or [], len(tokens.token_ids))
        self.result = finished(tokens, {**meta, "weight_versions": spans})
        return chunk

    def _keep(self, chunk: TokenChunk) -> TokenChunk:
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs
        return chunk


def _raise_failure(finish: JsonObject) -> None:
    """An abort with a status is the server's own: the request was wrong, or the server failed at it."""
    status = finish.get("status_code")
    if isinstance(status, int) and status >= 400:
        message = f"the engine ended the request with {status}: {finish.get('message')}"
        error: type[EngineError] = EngineRejected if status < 500 else EngineUnreachable
        raise error(message)


def _new_entries(entries: Sequence[Any], seen: int, after: int) -> Sequence[Any]:
    """Those of the tokens behind the first `seen`, of a list that ends with all `after` tokens or has the new ones."""
    if len(entries) >= after:
        return entries[len(entries) - after + seen :]
    return entries if len(entries) == after - seen else []


def _id_of(entry: Any) -> Any:
    match entry:
        case [_, token_id, *_]:
            return token_id
        case _:
            raise WireError(f"output_token_logprobs holds {entry!r:.80}; it must hold [log-probability, token id, ...]")


def _cut(spans: Sequence[Any], num_tokens: int) -> list[dict[str, Any]]:
    """The spans of the first `num_tokens` tokens: more may have been sampled than arrived."""
    fields = [as_object(span, "a span of weight_versions") for span in spans]
    return [
        {**span, "end": min(as_integer(span.get("end"), "end"), num_tokens)}
        for span in fields
        if as_integer(span.get("start"), "start") < max(1, num_tokens)
    ]
