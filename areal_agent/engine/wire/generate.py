"""`/generate`: one request, and its answer in one piece (stream.py: in events)."""

import uuid
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_agent.engine.fields import WireError, as_ids, as_integer, as_member, as_object, get, refuse_unknown
from areal_agent.engine.wire.sampling import decode_sampling, encode_sampling
from areal_agent.engine.wire.tokens import decode_tokens, encode_logprobs, top_entries
from areal_agent.engine.wire.versions import decode_spans, encode_spans
from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk
from areal_agent.types import FinishReason, JsonObject

GENERATE = "/generate"

_KNOWN = {"rid", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "stream"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateCall:
    """The body of `/generate`: what to sample, and whether the answer comes in events."""

    request: GenerateRequest
    is_streamed: bool


def encode_request(request: GenerateRequest, *, is_streamed: bool = False) -> dict[str, Any]:
    """The body of `/generate`, for orjson with NumPy: a long prompt is never a list of Python's integers.

    >>> from areal_agent.types import SamplingParams
    >>> encode_request(GenerateRequest(request_id="r1", input_ids=(5,), sampling=SamplingParams()))["rid"]
    'r1'
    """
    ids = request.input_ids
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": np.asarray(ids) if isinstance(ids, array) else ids,
        "sampling_params": encode_sampling(request.sampling),
        "return_logprob": True,
        "stream": is_streamed,
    }
    if request.num_top_logprobs:
        body["top_logprobs_num"] = request.num_top_logprobs
    return body


def decode_call(body: object) -> GenerateCall:
    """Read the body of `/generate`. What this wire does not carry is refused, not ignored. As with SGLang, a request
    without a `rid` is given one, and without `sampling_params` their defaults."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, _KNOWN, GENERATE)
    if fields.get("return_logprob", True) is not True:
        raise WireError(f"return_logprob is {fields['return_logprob']!r}; it is always on here: leave it out")
    parameters = fields.get("sampling_params")
    request = GenerateRequest(
        request_id=_request_id(fields),
        input_ids=as_ids(get(fields, "input_ids", list), "input_ids"),
        sampling=decode_sampling(as_object({} if parameters is None else parameters, "sampling_params")),
        num_top_logprobs=as_integer(fields.get("top_logprobs_num", 0), "top_logprobs_num"),
    )
    return GenerateCall(request=request, is_streamed=get({"stream": False, **fields}, "stream", bool))


def _request_id(fields: JsonObject) -> str:
    if fields.get("rid") is None:
        return uuid.uuid4().hex
    request_id = get(fields, "rid", str)
    if not request_id:
        raise WireError("rid is ''; give it a character at least, or leave it out")
    return request_id


def encode_result(request: GenerateRequest, result: GenerateResult, *, num_sent: int = 0) -> dict[str, Any]:
    """The answer of `/generate`, or the last event of a stream whose events before held the first `num_sent` tokens.

    `text` is empty: the embedded engine has no tokenizer.
    """
    rest = TokenChunk(
        token_ids=result.token_ids[num_sent:],
        logprobs=result.logprobs[num_sent:],
        top_logprobs=result.top_logprobs[num_sent:],
    )
    return {
        "text": "",
        "output_ids": rest.token_ids,
        "meta_info": {
            "id": request.request_id,
            "finish_reason": _encode_finish(result),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(result.token_ids),
            "cached_tokens": result.cached_tokens,
            "weight_versions": encode_spans(result.versions),
            **encode_logprobs(rest),
        },
    }


def _encode_finish(result: GenerateResult) -> dict[str, Any]:
    match result.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": result.token_ids[-1] if result.token_ids else None}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(result.token_ids)}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "the request was aborted; what was sampled until then is here"}


def decode_result(body: object) -> GenerateResult:
    """Read the answer of `/generate`. Log-probabilities and version spans must cover every token."""
    fields = as_object(body, "the answer")
    meta = as_object(get(fields, "meta_info", dict), "meta_info")
    tokens = decode_tokens(
        get(fields, "output_ids", list),
        get(meta, "output_token_logprobs", list),
        top_entries(meta),
    )
    return finished(tokens, meta)


def finished(tokens: TokenChunk, meta: JsonObject) -> GenerateResult:
    """The result that `tokens`, all of them, and the last `meta_info` make."""
    finish = as_object(get(meta, "finish_reason", dict), "finish_reason")
    return GenerateResult(
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        versions=decode_spans(get(meta, "weight_versions", list), len(tokens.token_ids)),
        finish_reason=as_member(FinishReason, get(finish, "type", str), "finish_reason.type"),
        cached_tokens=as_integer(meta.get("cached_tokens", 0), "cached_tokens"),
        top_logprobs=tokens.top_logprobs,
    )
