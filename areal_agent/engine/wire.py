"""Our records as the JSON of SGLang's native HTTP API, and back: the subset that client and embedded server share.

It knows neither sockets nor models. Reading is strict in both directions: a field that is missing, of the wrong type
or unknown raises `WireError`, never becomes a default.

Our one extension is `/update_weights_from_shared_memory`, whose body is a `SharedMemoryWeights` as JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from areal_agent.engine.fields import (
    WireError,
    as_ids,
    as_integer,
    as_member,
    as_number,
    as_object,
    get,
    refuse_unknown,
)
from areal_agent.types import (
    DiskWeights,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    JsonObject,
    PauseMode,
    SamplingParams,
    SharedMemoryWeights,
    TensorEntry,
    VersionSpan,
    WeightVersion,
)

GENERATE = "/generate"
ABORT_REQUEST = "/abort_request"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"
UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_FROM_SHARED_MEMORY = "/update_weights_from_shared_memory"
HEALTH = "/health"
SERVER_INFO = "/server_info"
MODEL_INFO = "/model_info"

MAX_SEED = 2**63 - 1

_LABEL = ("weight_version", "flush_cache")  # what every weight update carries


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What `/server_info` says of the engine's work since it started."""

    num_running: int  # requests that hold a slot
    num_queued: int  # requests that wait for one
    busy_s: float  # seconds in which a step was running
    generated_tokens: int
    weight_version: WeightVersion


# ------------------------------------------------------------------------------------------------ /generate


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """The body of `/generate`.

    >>> encode_request(GenerateRequest(request_id="r1", input_ids=(5,), sampling=SamplingParams()))["rid"]
    'r1'
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # 0 is `off` for us and an error for SGLang
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {
        "rid": request.request_id,
        "input_ids": list(request.input_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }


def decode_request(body: object) -> GenerateRequest:
    """Read the body of `/generate`. What this wire does not carry is refused, not ignored."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"rid", "input_ids", "sampling_params", "return_logprob", "stream"}, "/generate")
    if fields.get("stream", False) is not False:
        raise WireError(f"stream is {fields['stream']!r}; this engine answers in one piece: leave it out")
    if fields.get("return_logprob", True) is not True:
        raise WireError(f"return_logprob is {fields['return_logprob']!r}; it is always on here: leave it out")
    return GenerateRequest(
        request_id=get(fields, "rid", str),
        input_ids=as_ids(get(fields, "input_ids", list), "input_ids"),
        sampling=_decode_sampling(get(fields, "sampling_params", dict)),
    )


def _decode_sampling(fields: Mapping[str, Any]) -> SamplingParams:
    known = {"temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "sampling_seed"}
    refuse_unknown(fields, known, "sampling_params")
    temperature = as_number(fields.get("temperature", 1.0), "temperature")
    top_p = as_number(fields.get("top_p", 1.0), "top_p")
    top_k = as_integer(fields.get("top_k", -1), "top_k")
    max_tokens = as_integer(fields.get("max_new_tokens", 128), "max_new_tokens")
    seed = None if fields.get("sampling_seed") is None else as_integer(fields["sampling_seed"], "sampling_seed")
    if temperature < 0:
        raise WireError(f"temperature is {temperature}; it must be 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise WireError(f"top_p is {top_p}; it must be above 0 and at most 1 (off)")
    if top_k < 1 and top_k != -1:
        raise WireError(f"top_k is {top_k}; it must be at least 1, or -1 (off)")
    if max_tokens < 1:
        raise WireError(f"max_new_tokens is {max_tokens}; it must be at least 1")
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise WireError(f"sampling_seed is {seed}; it must be from 0 to {MAX_SEED}")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        stop_token_ids=as_ids(fields.get("stop_token_ids", []), "stop_token_ids"),
        seed=seed,
    )


def encode_result(request: GenerateRequest, result: GenerateResult) -> dict[str, Any]:
    """The answer of `/generate`. `text` is empty: the embedded engine has no tokenizer."""
    spans = [{"version": str(s.version), "start": s.start, "end": s.end} for s in result.versions]
    return {
        "text": "",
        "output_ids": list(result.token_ids),
        "meta_info": {
            "id": request.request_id,
            "finish_reason": _encode_finish(result),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(result.token_ids),
            "cached_tokens": result.cached_tokens,
            "weight_versions": spans,
            "output_token_logprobs": [
                [logprob, token_id, None] for logprob, token_id in zip(result.logprobs, result.token_ids, strict=True)
            ],
        },
    }


def _encode_finish(result: GenerateResult) -> dict[str, Any]:
    match result.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": result.token_ids[-1]}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(result.token_ids)}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "the request was aborted; what was sampled until then is here"}


def decode_result(body: object) -> GenerateResult:
    """Read the answer of `/generate`. Log-probabilities and version spans must cover every token."""
    fields = as_object(body, "the answer")
    meta = as_object(get(fields, "meta_info", dict), "meta_info")
    token_ids = as_ids(get(fields, "output_ids", list), "output_ids")
    logprobs = _decode_logprobs(get(meta, "output_token_logprobs", list), token_ids)
    versions = _decode_spans(get(meta, "weight_versions", list), len(token_ids))
    finish = as_object(get(meta, "finish_reason", dict), "finish_reason")
    return GenerateResult(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=as_member(FinishReason, get(finish, "type", str), "finish_reason.type"),
        cached_tokens=as_integer(meta.get("cached_tokens", 0), "cached_tokens"),
    )


def _decode_logprobs(entries: Sequence[Any], token_ids: tuple[int, ...]) -> tuple[float, ...]:
    pairs = [(as_number(entry[0], "a log-probability"), entry[1]) for entry in entries]
    if tuple(token_id for _, token_id in pairs) != token_ids:
        raise WireError(f"output_token_logprobs has {len(pairs)} entries that do not match {len(token_ids)} output_ids")
    return tuple(logprob for logprob, _ in pairs)


def _decode_spans(entries: Sequence[Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    covered = 0
    for entry in entries:
        fields = as_object(entry, "a span of weight_versions")
        start, end = as_integer(fields.get("start"), "start"), as_integer(fields.get("end"), "end")
        if start != covered or end < start:
            raise WireError(f"weight_versions has the span [{start}, {end}) where one from {covered} was due")
        spans.append(VersionSpan(version=_version(fields.get("version")), start=start, end=end))
        covered = end
    if covered != num_tokens:
        raise WireError(f"weight_versions cover {covered} of {num_tokens} tokens")
    return tuple(spans)


# ----------------------------------------------------------------------------------------- pause and abort


def encode_pause(mode: PauseMode) -> dict[str, Any]:
    """The body of `/pause_generation`."""
    return {"mode": mode.value}


def decode_pause(body: object) -> PauseMode:
    """Read the body of `/pause_generation`; SGLang's default is `abort`."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"mode"}, PAUSE_GENERATION)
    return as_member(PauseMode, fields.get("mode", PauseMode.ABORT.value), "mode")


def encode_abort(request_id: str) -> dict[str, Any]:
    """The body of `/abort_request`."""
    return {"rid": request_id}


def decode_abort(body: object) -> str | None:
    """Read the body of `/abort_request`: the request's id, or None for all of them."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"rid", "abort_all"}, ABORT_REQUEST)
    return None if fields.get("abort_all") is True else get(fields, "rid", str)


# ------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One set of weights to load. `flush_cache`: recompute the KV cache of every request under the new weights."""

    weights: SharedMemoryWeights | DiskWeights
    version: WeightVersion
    flush_cache: bool = True


def encode_update(update: WeightUpdate) -> tuple[str, dict[str, Any]]:
    """The path and the body that hand these weights over."""
    weights = update.weights
    label = {"weight_version": str(update.version), "flush_cache": update.flush_cache}
    if isinstance(weights, DiskWeights):
        return UPDATE_FROM_DISK, {"model_path": weights.path, **label}
    entries = [
        {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "offset": e.offset, "num_bytes": e.num_bytes}
        for e in weights.entries
    ]
    return UPDATE_FROM_SHARED_MEMORY, {"path": weights.path, "entries": entries, "crc32": weights.crc32, **label}


def decode_disk_update(body: object) -> WeightUpdate:
    """Read the body of `/update_weights_from_disk`. The version is required: weights never change without a label."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"model_path", *_LABEL}, UPDATE_FROM_DISK)
    return _labelled(fields, DiskWeights(path=get(fields, "model_path", str)))


def decode_shared_memory_update(body: object) -> WeightUpdate:
    """Read the body of `/update_weights_from_shared_memory`."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"path", "entries", "crc32", *_LABEL}, UPDATE_FROM_SHARED_MEMORY)
    weights = SharedMemoryWeights(
        path=get(fields, "path", str),
        entries=tuple(_decode_entry(entry) for entry in get(fields, "entries", list)),
        crc32=as_integer(fields.get("crc32"), "crc32"),
    )
    return _labelled(fields, weights)


def _labelled(fields: JsonObject, weights: SharedMemoryWeights | DiskWeights) -> WeightUpdate:
    flush_cache = get({"flush_cache": True, **fields}, "flush_cache", bool)
    return WeightUpdate(weights=weights, version=_version(fields.get("weight_version")), flush_cache=flush_cache)


def _decode_entry(entry: object) -> TensorEntry:
    fields = as_object(entry, "an entry of entries")
    return TensorEntry(
        name=get(fields, "name", str),
        dtype=get(fields, "dtype", str),
        shape=as_ids(get(fields, "shape", list), "shape"),
        offset=as_integer(fields.get("offset"), "offset"),
        num_bytes=as_integer(fields.get("num_bytes"), "num_bytes"),
    )


# --------------------------------------------------------------------------------------------------- info


def encode_info(info: EngineInfo, stats: EngineStats) -> dict[str, Any]:
    """The answer of `/server_info`; `/model_info` is a part of it."""
    return {
        "model_path": info.model_path,
        "weight_version": str(stats.weight_version),
        "vocab_size": info.vocab_size,
        "max_context_tokens": info.max_context_tokens,
        "num_running_reqs": stats.num_running,
        "num_queue_reqs": stats.num_queued,
        "busy_s": stats.busy_s,
        "generated_tokens": stats.generated_tokens,
    }


def decode_info(body: object) -> EngineInfo:
    """Read what `/server_info` says of the model."""
    fields = as_object(body, "the answer")
    return EngineInfo(
        model_path=get(fields, "model_path", str),
        weight_version=_version(fields.get("weight_version")),
        vocab_size=as_integer(fields.get("vocab_size"), "vocab_size"),
        max_context_tokens=as_integer(fields.get("max_context_tokens"), "max_context_tokens"),
    )


def decode_stats(body: object) -> EngineStats:
    """Read what `/server_info` says of the engine's work."""
    fields = as_object(body, "the answer")
    return EngineStats(
        num_running=as_integer(fields.get("num_running_reqs"), "num_running_reqs"),
        num_queued=as_integer(fields.get("num_queue_reqs"), "num_queue_reqs"),
        busy_s=as_number(fields.get("busy_s"), "busy_s"),
        generated_tokens=as_integer(fields.get("generated_tokens"), "generated_tokens"),
        weight_version=_version(fields.get("weight_version")),
    )


def encode_error(message: str) -> dict[str, Any]:
    """The body of every answer that is not a success; `success` is what weight updates look at."""
    return {"success": False, "message": message, "error": {"message": message}}


def decode_error(body: object) -> str:
    """The message of a failed answer, in either of SGLang's two shapes."""
    if isinstance(body, dict):
        fields = cast(dict[str, Any], body)
        error = fields.get("error")
        nested = cast(dict[str, Any], error).get("message") if isinstance(error, dict) else error
        message = nested or fields.get("message")
        if isinstance(message, str):
            return message
    return f"{body!r}"


def _version(value: object) -> WeightVersion:
    if not isinstance(value, str):
        raise WireError(f"weight_version is {value!r:.80}; it must be a string such as '0:17'")
    try:
        return WeightVersion.parse(value)
    except ValueError as error:
        raise WireError(str(error)) from None
