"""One vLLM server, as `foreign.server.ForeignServer`. It is started by launcher.py.

How vLLM deviates from what this project needs, and what is done about it:

    log-probabilities are before temperature             launcher.py asks for those that were sampled from
    a reload leaves a tied head as it was, on a CPU      worker_extension.py packs the head again
    loaded adapters apply to later requests only         worker_extension.py replaces the adapters in place
    a load does not change the label                     it is set afterwards, and read back
    a flush may be refused with a success status         the answer is read; running requests are reset first
    the prefix cache is keyed by tokens alone            requests are salted with the label of the weights
    images are looked for by the id of their pads        image_files.py puts them at the places of the request
    what was seen in images outlasts the weights         a flush resets it, and hashes have the label of the weights
    the folder that serves is not reported after a load  foreign/server.py remembers it
    `/health` answers while the scheduler hangs          `/is_paused` goes through the scheduler
    the likeliest tokens start with the sampled one      one more is requested, and they are ranked
    idle connections are closed after 5 s                every call has its own connection
    ids outside the vocabulary, prompts too long         foreign/engine.py checks them with this project's messages

Seeds work. On a CPU, vLLM needs a head dimension of 32 or more.
"""

from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_agent.engine.foreign.server import ForeignServer, Served, ServerState, label_spans
from areal_agent.engine.foreign.weight_folders import is_adapter
from areal_agent.engine.vllm import VLLM_LAUNCHER
from areal_agent.engine.wire.control import EngineStats
from areal_agent.engine.wire.fields import (
    UNLABELLED,
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
from areal_agent.engine.wire.generate import Tokens
from areal_agent.errors import WeightUpdateError
from areal_agent.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    JsonObject,
    PauseMode,
    PromptImage,
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

    is_over = False

    def __init__(self, *, num_top_logprobs: int, takes_unlabelled: bool = False) -> None:
        self.result: GenerateResult | None = None
        self._takes_unlabelled = takes_unlabelled
        self._num_top_logprobs = num_top_logprobs
        self._tokens = Tokens()

    def read(self, fields: JsonObject) -> TokenChunk:
        choices: list[Any] = get(fields, "choices", list)
        if not choices:
            self._read_usage(as_object(fields.get("usage"), "usage"))
            return _NO_TOKENS
        choice = as_object(choices[0], "an entry of choices")
        chunk = self._new_tokens(choice)
        self._tokens.add(chunk)
        if choice.get("finish_reason") is not None:
            self.result = self._finished(choice)
        return chunk

    def _finished(self, choice: JsonObject) -> GenerateResult:
        spans: Sequence[Any] = choice.get("weight_versions") or []
        if self._takes_unlabelled:
            spans = label_spans(spans)
        tokens = self._tokens.all()
        return GenerateResult(
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            versions=decode_spans(spans, len(tokens.token_ids)),
            finish_reason=as_member(FinishReason, choice.get("finish_reason"), "finish_reason"),
            top_logprobs=tokens.top_logprobs,
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


GENERATE = "/inference/v1/generate"
ABORT_REQUESTS = "/abort_requests"
COLLECTIVE_RPC = "/collective_rpc"
RESET_CACHE = "/reset_prefix_cache?reset_running_requests=true"
RESET_IMAGES = "/reset_encoder_cache"
UPDATE_LABEL = "/update_weight_version"


def _results(body: object) -> list[str]:
    return get(as_object(body, COLLECTIVE_RPC), "results", list)


_OFF = SamplingParams()
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # our names, and vLLM's


def encode_sampling(request: GenerateRequest) -> dict[str, Any]:
    """Return the object `sampling_params`. Parameters that are off are left out.

    Stop texts are not sent, because the gateway cuts texts.

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
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "logprobs": _num_logprobs(request),
    }
    for name in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens"):
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


def encode_images(images: Sequence[PromptImage], label: str) -> dict[str, Any]:
    """Return the object `features`, with files where vLLM has tensors (image_files.py).

    A server without that file refuses them. Other weights see other things in an image, so its hash has their label.
    """
    spans = [image.span for image in images]
    return {
        "mm_hashes": {"image": [f"{span.digest}:{label}" for span in spans]},
        "mm_placeholders": {"image": [{"offset": span.start, "length": span.end - span.start} for span in spans]},
        "kwargs_data": {"image": [b64encode(image.data).decode() for image in images]},
    }


def encode_scoring(ids: Sequence[int]) -> dict[str, Any]:
    """Return the request for the log-probabilities of given tokens, before temperature. vLLM always samples a token."""
    params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": ids, "sampling_params": params, "stream": False}


def decode_scores(body: object, ids: Sequence[int], start: int) -> tuple[float, ...]:
    """Read the log-probabilities of `ids` after position `start`. Each position has an object by token id."""
    entries: list[Any] = get(as_object(body, GENERATE), "prompt_logprobs", list)
    if len(entries) != len(ids):
        raise WireError(f"prompt_logprobs has {len(entries)} entries for {len(ids)} tokens")
    by_id = [as_object(entry, "an entry of prompt_logprobs") for entry in entries[start + 1 :]]
    found = [as_object(one.get(str(token)), str(token)) for one, token in zip(by_id, ids[start + 1 :], strict=True)]
    return as_numbers([one.get("logprob") for one in found], "a log-probability")


_MODES = {PauseMode.ABORT: "abort", PauseMode.RETRACT: "keep", PauseMode.IN_PLACE: "keep", PauseMode.WAIT: "wait"}


class VllmServer(ForeignServer):
    """Every request carries the label of the weights that serve when it is sent.

    The label salts the prefix cache, so that keys and values of other weights are never reused. A server that applies
    adapters is told their name with every request.
    """

    kind = "vLLM"
    launcher = VLLM_LAUNCHER
    generate_path = GENERATE

    def __init__(self, base_url: str, *, key: str | None = None, takes_unlabelled: bool = False) -> None:
        super().__init__(base_url, key=key, takes_unlabelled=takes_unlabelled)
        self._applies_adapter = False

    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        ids = request.input_ids
        return {
            **({"model": ADAPTER} if self._applies_adapter else {}),
            **({"features": encode_images(request.images, label)} if request.images else {}),
            "request_id": rid,
            "token_ids": np.asarray(ids) if isinstance(ids, array) else ids,
            "sampling_params": encode_sampling(request),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": label,
        }

    def reader(self, request: GenerateRequest) -> VllmAnswer:
        return VllmAnswer(num_top_logprobs=request.num_top_logprobs, takes_unlabelled=self.takes_unlabelled)

    async def abort(self, rid: str) -> None:
        await self.transport.post(ABORT_REQUESTS, {"request_ids": [f"generate-tokens-{rid}"]})  # vLLM's own prefix

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `wait` also waits for the requests of other clients."""
        path = f"/pause?mode={_MODES[mode]}&clear_cache=false"
        await self.transport.post(path, {}, has_limit=mode is not PauseMode.WAIT)

    async def resume(self) -> None:
        await self.transport.post("/resume", {})

    async def load_folder(self, path: str, label: str, *, flush_cache: bool, num_bytes: int) -> None:
        method = "load_adapter" if is_adapter(Path(path)) else "load_folder"
        await self._let_workers(method, path, label, flush_cache=flush_cache, num_bytes=num_bytes)

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        await self._let_workers("load_received", push_id, label, flush_cache=flush_cache)

    async def label(self) -> str:
        return self.transport.decoded(decode_label, WEIGHT_INFO, await self.transport.get(WEIGHT_INFO))

    async def ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """Call a method of the workers and return each worker's answer."""
        return await self.call(COLLECTIVE_RPC, {"method": method, "args": arguments}, _results)

    async def _let_workers(
        self, method: str, argument: str, label: str, *, flush_cache: bool, num_bytes: int = 0
    ) -> None:
        """Make all workers load with their method `method`, and set the label, which a load does not change."""
        await self.call(COLLECTIVE_RPC, {"method": method, "args": [argument]}, lambda _: None, num_bytes)
        if flush_cache:  # running requests are reset to their beginning
            answer = await self.transport.post(RESET_CACHE, {}, refusal=WeightUpdateError)
            if answer != {"success": True}:
                raise WeightUpdateError(
                    f"{self.transport.base_url} kept keys and values of the previous weights: {answer}"
                )
            await self.transport.post(RESET_IMAGES, {}, refusal=WeightUpdateError)
        await self.transport.post(UPDATE_LABEL, {"new_version": label}, refusal=WeightUpdateError)

    async def state(self) -> ServerState:
        """Return what it was started with and what serves now. Only the source of the first weights is reported."""
        started = self.transport.decoded(decode_started, MODELS, await self.transport.get(MODELS))
        label = await self.label()
        begun_with = started.adapter or started.model
        self._applies_adapter = started.adapter is not None
        return ServerState(
            model=started.model,
            served=Served(source=begun_with if label == UNLABELLED else None, label=label),
            max_context_tokens=started.max_context_tokens,
            has_grammar=True,
            applies_adapters=self._applies_adapter,
        )

    async def stats(self, version: WeightVersion) -> EngineStats:
        """Return how many requests it runs now, and what it has sampled since its start."""
        text = await self.transport.text(METRICS)
        return self.transport.decoded(lambda body: decode_metrics(body, version), METRICS, text)

    async def probe(self, timeout_s: float) -> None:
        """Ask `/is_paused`, which goes through the scheduler."""
        await self.transport.get(IS_PAUSED, timeout_s=timeout_s)
