"""Reads the events of one answer of vLLM: new tokens each, the version spans of all with the last, then their number.

A log-probability of -9999 stands for one that is minus infinity, or that vLLM does not know.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from areal_agent.engine.fields import WireError, as_ids, as_integer, as_member, as_numbers, as_object, get
from areal_agent.engine.foreign.unlabelled import label_spans
from areal_agent.engine.wire.versions import decode_spans
from areal_agent.engine_types import GenerateResult, TokenChunk, TopLogprobs
from areal_agent.types import FinishReason, JsonObject

NEVER = -9999.0

_NO_TOKENS = TokenChunk(token_ids=(), logprobs=())


class VllmAnswer:
    """Puts the events of one answer together. `result` is there after the one with the finish reason."""

    def __init__(self, *, num_top_logprobs: int, takes_unlabelled: bool = False) -> None:
        """With `takes_unlabelled` weights that nobody has labelled are the first version."""
        self._takes_unlabelled = takes_unlabelled
        self.result: GenerateResult | None = None
        self._num_top_logprobs = num_top_logprobs
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; the tokens that are new, perhaps none."""
        choices: list[Any] = get(fields, "choices", list)
        if not choices:
            self._read_usage(as_object(fields.get("usage"), "usage"))
            return _NO_TOKENS
        choice = as_object(choices[0], "an entry of choices")
        chunk = self._new_tokens(choice)
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs
        if choice.get("finish_reason") is not None:
            self.result = self._finished(choice)
        return chunk

    def _finished(self, choice: JsonObject) -> GenerateResult:
        spans: Sequence[Any] = choice.get("weight_versions") or []
        if self._takes_unlabelled:
            spans = label_spans(spans)
        return GenerateResult(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            versions=decode_spans(spans, len(self._token_ids)),
            finish_reason=as_member(FinishReason, choice.get("finish_reason"), "finish_reason"),
            top_logprobs=tuple(self._top_logprobs),
        )

    def _read_usage(self, usage: JsonObject) -> None:
        """It comes last, and has how much of the prompt was known."""
        details = usage.get("prompt_tokens_details")
        if self.result is not None and details is not None:
            cached = as_object(details, "prompt_tokens_details").get("cached_tokens") or 0
            self.result = replace(self.result, cached_tokens=as_integer(cached, "cached_tokens"))

    def _new_tokens(self, choice: JsonObject) -> TokenChunk:
        ids = as_ids(choice.get("token_ids") or [], "token_ids")
        if not ids:
            return _NO_TOKENS
        content: list[Any] = get(as_object(choice.get("logprobs"), "logprobs"), "content", list)
        entries = [as_object(entry, "an entry of content") for entry in content]
        if tuple(entry.get("token_id") for entry in entries) != ids:
            raise WireError(f"logprobs has {len(entries)} entries that do not match {len(ids)} token_ids")
        logprobs = as_numbers([entry.get("logprob") for entry in entries], "a log-probability")
        if NEVER in logprobs:
            raise WireError(
                f"the log-probability of token {ids[logprobs.index(NEVER)]}, which was sampled, is not known"
            )
        return TokenChunk(
            token_ids=ids,
            logprobs=logprobs,
            top_logprobs=tuple(self._likeliest(entry) for entry in entries) if self._num_top_logprobs else (),
        )

    def _likeliest(self, entry: JsonObject) -> TopLogprobs:
        """Of candidates among which the sampled token is the first, likely or not."""
        tops: Sequence[Any] = get(entry, "top_logprobs", list)
        candidates = [as_object(top, "an entry of top_logprobs") for top in tops]
        logprobs = as_numbers([one.get("logprob") for one in candidates], "a log-probability")
        ids = as_ids([one.get("token_id") for one in candidates], "top_logprobs")
        ranked = sorted(zip(ids, logprobs, strict=True), key=lambda pair: -pair[1])
        return tuple((id_, logprob) for id_, logprob in ranked if logprob != NEVER)[: self._num_top_logprobs]
