"""One vLLM server, as `foreign.engine.ForeignServer`. It is started by launcher.py.

How vLLM deviates from what this project needs, and what is done about it:

    log-probabilities are before temperature             launcher.py asks for those that were sampled from
    a reload leaves a tied head as it was, on a CPU      worker_extension.py packs the head again
    loaded adapters apply to later requests only         worker_extension.py replaces the adapters in place
    a load does not change the label                     it is set afterwards, and read back
    a flush may be refused with a success status         the answer is read; running requests are reset first
    the prefix cache is keyed by tokens alone            requests are salted with the label of the weights
    the folder that serves is not reported after a load  foreign/weights.py remembers it
    `/health` answers while the scheduler hangs          `/is_paused` goes through the scheduler
    an answer ends at the model's end token              `encode_sampling` uses only the tokens of the request
    the likeliest tokens start with the sampled one      one more is requested, and they are ranked
    idle connections are closed after 5 s                every call has its own connection
    ids outside the vocabulary, prompts too long         foreign/engine.py checks them with this project's messages

Seeds work. On a CPU, vLLM needs a head dimension of 32 or more.
"""

import asyncio
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_agent.engine.foreign.engine import ServerState
from areal_agent.engine.foreign.weight_folders import is_adapter
from areal_agent.engine.foreign.weights import Served, label_spans
from areal_agent.engine.pushes import size_of_folder
from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm import VLLM_LAUNCHER
from areal_agent.engine.wire import EngineStats
from areal_agent.engine.wire.fields import (
    WireError,
    as_ids,
    as_integer,
    as_member,
    as_number,
    as_numbers,
    as_object,
    decode_spans,
    get,
)
from areal_agent.errors import EngineError, WeightUpdateError
from areal_agent.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    JsonObject,
    PauseMode,
    SamplingParams,
    TokenChunk,
    TopLogprobs,
    WeightVersion,
)

NEVER = -9999.0

_NO_TOKENS = TokenChunk(token_ids=(), logprobs=())


class VllmAnswer:
    """Assembles the events of one answer. `result` is set after the event with the finish reason.

    Each event has new tokens; the last of them has all version spans, and token counts follow. A log-probability of
    -9999 stands for minus infinity, or for one that vLLM does not know.
    """

    def __init__(self, *, num_top_logprobs: int, takes_unlabelled: bool = False) -> None:
        """If `takes_unlabelled`, weights that nobody has labelled count as the first version."""
        self._takes_unlabelled = takes_unlabelled
        self.result: GenerateResult | None = None
        self._num_top_logprobs = num_top_logprobs
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; return its new tokens, if any."""
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
        """Read the last event, which says how much of the prompt was cached."""
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
            raise WireError(f"the log-probability of the sampled token {ids[logprobs.index(NEVER)]} is unknown")
        return TokenChunk(
            token_ids=ids,
            logprobs=logprobs,
            top_logprobs=tuple(self._likeliest(entry) for entry in entries) if self._num_top_logprobs else (),
        )

    def _likeliest(self, entry: JsonObject) -> TopLogprobs:
        """Rank the candidates, the first of which is the sampled token, however likely."""
        tops: Sequence[Any] = get(entry, "top_logprobs", list)
        candidates = [as_object(top, "an entry of top_logprobs") for top in tops]
        logprobs = as_numbers([one.get("logprob") for one in candidates], "a log-probability")
        ids = as_ids([one.get("token_id") for one in candidates], "top_logprobs")
        ranked = sorted(zip(ids, logprobs, strict=True), key=lambda pair: -pair[1])
        return tuple((id_, logprob) for id_, logprob in ranked if logprob != NEVER)[: self._num_top_logprobs]


MODELS = "/v1/models"
WEIGHT_INFO = "/weight_info"
IS_PAUSED = "/is_paused"
METRICS = "/metrics"

ADAPTER = "policy"
"""The name of the adapters that requests are answered with."""

UNLABELLED = "default"
"""vLLM's label of weights that nobody labelled: those that it was started with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The start-up settings of a server."""

    model: Path
    max_context_tokens: int
    adapter: Path | None = None  # the adapters that it was started with, if it applies any


def decode_started(body: object) -> Started:
    """Read `/v1/models`. It lists the adapters after the model; only our own count."""
    cards: list[Any] = get(as_object(body, MODELS), "data", list)
    if not cards:
        raise WireError("data is empty; it must name the model that is served")
    card, *others = [as_object(one, "an entry of data") for one in cards]
    adapters = [Path(get(one, "root", str)) for one in others if one.get("id") == ADAPTER]
    return Started(
        model=Path(get(card, "root", str)),
        max_context_tokens=as_integer(card.get("max_model_len"), "max_model_len"),
        adapter=adapters[0] if adapters else None,
    )


def decode_label(body: object) -> str:
    """Read the label in `/weight_info`."""
    return get(as_object(body, WEIGHT_INFO), "weight_version", str)


def decode_metrics(text: str, version: WeightVersion) -> EngineStats:
    """Read `/metrics`, in Prometheus' text format: sums over all engines of the server."""
    sums = _sums(text)
    return EngineStats(
        num_running=int(_told(sums, "vllm:num_requests_running")),
        num_queued=int(_told(sums, "vllm:num_requests_waiting")),
        busy_s=None,
        generated_tokens=int(_told(sums, "vllm:generation_tokens_total")),
        weight_version=version,
    )


def _sums(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, value = line.partition(" ")[0].partition("{")[0], line.rpartition(" ")[2]
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            raise WireError(f"{METRICS} has the line {line!r:.80}; it must end with a number") from None
    return sums


def _told(sums: JsonObject, name: str) -> float:
    return as_number(sums.get(name), name)


COLLECTIVE_RPC = "/collective_rpc"
RESET_CACHE = "/reset_prefix_cache?reset_running_requests=true"
UPDATE_LABEL = "/update_weight_version"


class VllmLoader:
    """Makes one server load weights. A load does not change the label, so it is set afterwards and read back."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def load(self, folder: Path, label: str, *, flush_cache: bool) -> None:
        """Make the paused server load a folder under a label. Raises EngineError unless it confirms the label."""
        path = os.path.abspath(folder)  # noqa: ASYNC240 (no disk: the server has a working directory of its own)
        method = "load_adapter" if is_adapter(Path(path)) else "load_folder"
        num_bytes = await asyncio.to_thread(size_of_folder, folder)
        await self.let_workers(method, path, label, flush_cache=flush_cache, num_bytes=num_bytes)

    async def let_workers(
        self, method: str, argument: str, label: str, *, flush_cache: bool, num_bytes: int = 0
    ) -> None:
        """Make all workers load with their method `method`, reading `num_bytes` from a disk; the rest is as in `load`.

        With `flush_cache`, running requests are reset to their beginning, so that all their keys and values are
        computed again.
        """
        try:
            await self._tell(COLLECTIVE_RPC, {"method": method, "args": [argument]}, num_bytes)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {VLLM_LAUNCHER}?") from error
        if flush_cache:
            await self._flush_cache()
        await self._tell(UPDATE_LABEL, {"new_version": label})
        served = self._transport.decoded(decode_label, WEIGHT_INFO, await self._transport.get(WEIGHT_INFO))
        if served != label:
            raise WeightUpdateError(
                f"{self._transport.base_url} reports that it serves {served} after an update to {label}"
            )

    async def _flush_cache(self) -> None:
        answer = await self._tell(RESET_CACHE, {})
        if answer != {"success": True}:
            raise WeightUpdateError(
                f"{self._transport.base_url} kept keys and values of the previous weights: {answer}"
            )

    async def _tell(self, path: str, body: dict[str, object], num_bytes: int = 0) -> object:
        return await self._transport.post(path, body, refusal=WeightUpdateError, num_bytes=num_bytes)


class VllmReceiver:
    """Makes all workers of one server receive weights."""

    def __init__(self, transport: Transport, loader: VllmLoader) -> None:
        self._transport = transport
        self._loader = loader

    async def ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """Call a method of the workers and return each worker's answer."""
        body = {"method": method, "args": arguments}
        try:
            answer = await self._transport.post(COLLECTIVE_RPC, body, refusal=WeightUpdateError)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {VLLM_LAUNCHER}?") from error
        return self._transport.decoded(_results, COLLECTIVE_RPC, answer)

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        """Make the paused server load what its workers hold. Raises EngineError unless it confirms the label."""
        await self._loader.let_workers("load_received", push_id, label, flush_cache=flush_cache)


def _results(body: object) -> list[str]:
    return get(as_object(body, COLLECTIVE_RPC), "results", list)


_OFF = SamplingParams()
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # our names, and vLLM's


def encode_sampling(request: GenerateRequest) -> dict[str, Any]:
    """Return the object `sampling_params`. Parameters that are off are left out.

    An answer ends at the request's own stop tokens, never at the model's end token. Stop texts are not sent, because
    the gateway cuts texts.

    >>> request = GenerateRequest(request_id="r1", input_ids=(5,), sampling=SamplingParams(max_tokens=7))
    >>> encode_sampling(request)["max_tokens"]
    7
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),  # 0 is off
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": _num_logprobs(request),
    }
    for name in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if getattr(sampling, name) != getattr(_OFF, name):
            params[name] = getattr(sampling, name)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.grammar is not None:
        name, text = sampling.grammar
        params["structured_outputs"] = {_GRAMMARS[name]: text}
    return params


def _num_logprobs(request: GenerateRequest) -> int:
    """Return one more than requested, because the sampled token takes a place among them, however likely."""
    return request.num_top_logprobs + 1 if request.num_top_logprobs else 0


GENERATE = "/inference/v1/generate"
ABORT_REQUESTS = "/abort_requests"

_PREFIX = "generate-tokens-"  # vLLM's own prefix of the id that it was given


class VllmDialect:
    """Token ids in, token ids out, in events. Each request carries the label of the weights that serve when it is sent.

    The label salts the prefix cache, so that keys and values of other weights are never reused. If the server
    `applies_adapter`, every request names the adapters.
    """

    path = GENERATE

    def __init__(self, *, takes_unlabelled: bool = False) -> None:
        self.applies_adapter = False
        self._takes_unlabelled = takes_unlabelled

    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        """Return the body of a request."""
        ids = request.input_ids
        return {
            **({"model": ADAPTER} if self.applies_adapter else {}),
            "request_id": rid,
            "token_ids": np.asarray(ids) if isinstance(ids, array) else ids,
            "sampling_params": encode_sampling(request),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": label,
        }

    def reader(self, request: GenerateRequest) -> VllmAnswer:
        """Return a reader for the events of the request's answer."""
        return VllmAnswer(num_top_logprobs=request.num_top_logprobs, takes_unlabelled=self._takes_unlabelled)

    async def abort(self, transport: Transport, rid: str) -> None:
        """Make the server end a request that has begun."""
        await transport.post(ABORT_REQUESTS, {"request_ids": [_PREFIX + rid]})


_MODES = {PauseMode.ABORT: "abort", PauseMode.RETRACT: "keep", PauseMode.IN_PLACE: "keep", PauseMode.WAIT: "wait"}


class VllmServer:
    """The address of one server, and how to talk to it."""

    kind = "vLLM"

    def __init__(self, base_url: str, *, takes_unlabelled: bool = False) -> None:
        """If `takes_unlabelled`, weights that nobody has labelled count as the first version."""
        self.transport = Transport(base_url, keeps_connections=False)  # uvicorn closes them after 5 s
        self.dialect = VllmDialect(takes_unlabelled=takes_unlabelled)
        self.loader = VllmLoader(self.transport)
        self.receiver = VllmReceiver(self.transport, self.loader)

    async def state(self) -> ServerState:
        """Return what it was started with and what serves now. Only the source of the first weights is reported."""
        ask, read = self.transport.get, self.transport.decoded
        started = read(decode_started, MODELS, await ask(MODELS))
        label = read(decode_label, WEIGHT_INFO, await ask(WEIGHT_INFO))
        begun_with = started.adapter or started.model
        self.dialect.applies_adapter = started.adapter is not None
        return ServerState(
            model=started.model,
            served=Served(source=begun_with if label == UNLABELLED else None, label=label),
            max_context_tokens=started.max_context_tokens,
            has_grammar=True,
            applies_adapters=started.adapter is not None,
        )

    async def stats(self, version: WeightVersion) -> EngineStats:
        """Return how many requests it runs now, and what it has sampled since its start."""
        text = await self.transport.text(METRICS)
        return self.transport.decoded(lambda body: decode_metrics(body, version), METRICS, text)

    async def probe(self, timeout_s: float) -> None:
        """Ask `/is_paused`, which goes through the scheduler."""
        await self.transport.get(IS_PAUSED, timeout_s=timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `wait` also waits for the requests of other clients."""
        path = f"/pause?mode={_MODES[mode]}&clear_cache=false"
        await self.transport.post(path, {}, has_limit=mode is not PauseMode.WAIT)

    async def resume(self) -> None:
        """Continue sampling."""
        await self.transport.post("/resume", {})
