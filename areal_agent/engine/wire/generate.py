"""`/generate`: one request with its sampling parameters, and its answer in one piece or in events.

Parameters that are off are not sent. `SamplingParams.stop` never is, because the gateway cuts texts.

Events are lines `data: {...}`, and `data: [DONE]` after the last one. Every event has the number of tokens so far in
`meta_info.completion_tokens`. The embedded engine sends only new tokens, with their version spans; SGLang sends all
tokens every time. The length of each list tells which. The last event has the finish reason and all version spans.
"""

import math
import re
import uuid
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Self, cast

import numpy as np
import orjson
from pydantic import AfterValidator, Base64Bytes, Field, model_validator

from areal_agent.engine.wire.fields import (
    Message,
    WireError,
    as_ids,
    as_integer,
    as_member,
    as_numbers,
    as_object,
    decode_json,
    decode_new_spans,
    decode_spans,
    encode_spans,
    get,
)
from areal_agent.errors import EngineRejected
from areal_agent.types import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ImageSpan,
    JsonObject,
    PromptImage,
    SamplingParams,
    TokenChunk,
    TopLogprobs,
)

MAX_SEED = 2**63 - 1

TEMPERATURES = (1e-6, 1e6)
"""The range of temperatures besides 0 (greedy). It and the two limits below keep logits finite in float32."""

MIN_REPETITION_PENALTY = 0.01

MAX_BIAS = 1e6

_OFF = SamplingParams()
_GRAMMARS = ("json_schema", "regex", "ebnf")


def _holds(is_right: Callable[[Any], bool], must: str) -> AfterValidator:
    """Return a check of one value; `must` ends its refusal."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"it must be {must}")
        return value

    return AfterValidator(check)


def _within(low: float, high: float, off: float) -> AfterValidator:
    return _holds(lambda value: low <= value <= high, f"from {low:g} to {high:g} ({off:g} is off)")


_COLDEST, _HOTTEST = TEMPERATURES
_Temperature = Annotated[
    float,
    _holds(
        lambda value: not value or _COLDEST <= value <= _HOTTEST, f"0 (greedy), or from {_COLDEST:g} to {_HOTTEST:g}"
    ),
]
_Penalty = Annotated[float, _within(-2, 2, off=0)]
_TokenId = Annotated[str, _holds(lambda key: re.fullmatch("[0-9]{1,10}", key) is not None, "a token id")]
_TokenIds = Annotated[
    tuple[int, ...], Field(fail_fast=True)
]  # without it, each of a million wrong ids would be collected


class Sampling(Message):
    """The object `sampling_params`; a parameter that is missing is off."""

    temperature: _Temperature = 1.0
    top_p: Annotated[float, _holds(lambda value: 0 < value <= 1, "above 0 and at most 1 (off)")] = 1.0
    top_k: Annotated[int, _holds(lambda value: value >= 1 or value == -1, "at least 1, or -1 (off)")] = -1
    min_p: Annotated[float, _within(0, 1, off=0)] = 0.0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, _within(MIN_REPETITION_PENALTY, 2, off=1)] = 1.0
    logit_bias: dict[_TokenId, Annotated[float, _within(-MAX_BIAS, MAX_BIAS, off=0)]] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    max_new_tokens: Annotated[int, Field(ge=0)] = 128
    min_new_tokens: Annotated[int, _holds(lambda value: value >= 0, "0 (off) or more")] = 0
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool = False
    sampling_seed: Annotated[int, _holds(lambda value: 0 <= value <= MAX_SEED, f"from 0 to {MAX_SEED}")] | None = None

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; an answer is held to one of {', '.join(_GRAMMARS)}")
        return self

    def params(self) -> SamplingParams:
        renamed = {"max_new_tokens", "min_new_tokens", "sampling_seed"}
        same = self.model_dump(exclude={"logit_bias", "stop_token_ids", *renamed})
        return SamplingParams(
            **same,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in (self.logit_bias or {}).items()),
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            stop_token_ids=self.stop_token_ids or (),
            seed=self.sampling_seed,
        )


def encode_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Encode the object `sampling_params`, without parameters that are off."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # 0 is off for us and an error for SGLang
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", *_GRAMMARS):
        if getattr(sampling, name) != getattr(_OFF, name):
            params[name] = getattr(sampling, name)
    if sampling.min_tokens:
        params["min_new_tokens"] = sampling.min_tokens
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


def encode_logprobs(chunk: TokenChunk) -> dict[str, Any]:
    """Encode the fields of `meta_info` that have one entry for each token."""
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
    """Read the likeliest tokens in `meta_info`; empty if they were not requested."""
    return [] if meta.get("output_top_logprobs") is None else get(meta, "output_top_logprobs", list)


def decode_tokens(ids: Sequence[Any], logprobs: Sequence[Any], tops: Sequence[Any]) -> TokenChunk:
    """Read token ids and their log-probabilities. `tops` is empty if the likeliest tokens were not requested."""
    token_ids = as_ids(ids, "output_ids")
    sampled_ids, sampled_logprobs = _columns(logprobs)
    if sampled_ids != token_ids:
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
    """Read the likeliest tokens at one position. A null log-probability (minus infinity in JSON) is left out."""
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


def _columns(entries: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split entries `[log-probability, token id, ...]` into token ids and log-probabilities."""
    try:
        logprobs, token_ids, *_ = zip(*entries, strict=False) if entries else ((), ())
        return token_ids, logprobs
    except (TypeError, ValueError):
        raise WireError(
            f"log-probabilities are {entries!r:.80}; each must be [log-probability, token id, ...]"
        ) from None


GENERATE = "/generate"


class WireImage(Message):
    """An image of the prompt: where its tokens stand, and its file in base64."""

    digest: str
    start: int
    end: int
    data: Base64Bytes

    def image(self) -> PromptImage:
        return PromptImage(span=ImageSpan(digest=self.digest, start=self.start, end=self.end), data=self.data)


class GenerateCall(Message):
    """The body of `/generate`. As with SGLang, a missing `rid` is generated."""

    rid: Annotated[str, _holds(bool, "a character at least, or left out")] | None = None
    input_ids: _TokenIds
    sampling_params: Sampling | None = None
    return_logprob: Annotated[bool, _holds(bool, "left out: it is always on here")] = True
    top_logprobs_num: int = 0
    logprob_start_len: Annotated[int, _holds(lambda value: value >= -1, "a position in input_ids, or -1 (off)")] = -1
    stream: bool = False
    images: tuple[WireImage, ...] = ()

    @model_validator(mode="after")
    def _samples_or_scores(self) -> Self:
        most, start = (self.sampling_params or Sampling()).max_new_tokens, self.logprob_start_len
        if (most == 0) != (start >= 0) or (start >= 0 and self.stream):
            raise ValueError(
                f"max_new_tokens is {most}, logprob_start_len {start} and stream {self.stream}; to have the tokens of "
                "a prompt scored, set the first to 0, the second to a position, and do not stream; else leave them out"
            )
        return self

    def request(self) -> GenerateRequest:
        return GenerateRequest(
            request_id=self.rid or uuid.uuid4().hex,
            input_ids=self.input_ids,
            sampling=(self.sampling_params or Sampling()).params(),
            num_top_logprobs=self.top_logprobs_num,
            images=tuple(image.image() for image in self.images),
        )


def encode_request(request: GenerateRequest, *, is_streamed: bool = False) -> dict[str, Any]:
    """Encode the body of `/generate` for orjson with NumPy, which avoids a list of Python integers for a long prompt.

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
    if request.images:
        body["images"] = [asdict(one.span) | {"data": b64encode(one.data).decode()} for one in request.images]
    return body


def encode_scoring(ids: Sequence[int], start: int, temperature: float) -> dict[str, Any]:
    """Encode the body of `/generate` that asks for the log-probabilities of `ids` after position `start`, and samples
    nothing. SGLang leaves the temperature out of them.
    """
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": temperature, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start,
    }


def encode_scores(call: GenerateCall, scores: Sequence[float]) -> dict[str, Any]:
    """Encode the answer: an entry for each token from `logprob_start_len` on, of which the first has none."""
    entries = zip((None, *scores), call.input_ids[call.logprob_start_len :], strict=True)
    meta = {"prompt_tokens": len(call.input_ids), "completion_tokens": 0, "finish_reason": {"type": "length"}}
    logprobs = [(logprob, token_id, None) for logprob, token_id in entries]
    return {"text": "", "output_ids": [], "meta_info": {**meta, "input_token_logprobs": logprobs}}


def decode_scores(body: object, ids: Sequence[int], start: int) -> tuple[float, ...]:
    """Read the log-probabilities of `ids` after position `start`."""
    meta = as_object(get(as_object(body, "the answer"), "meta_info", dict), "meta_info")
    scored_ids, logprobs = _columns(get(meta, "input_token_logprobs", list))
    if scored_ids != tuple(ids[start:]):
        raise WireError(
            f"input_token_logprobs has {len(scored_ids)} entries that are not the last tokens of the prompt"
        )
    return as_numbers(logprobs[1:], "a log-probability")


MAX_MASKED_STOPS = 100
"""The limit on `stop_token_ids` beside `min_tokens`: vLLM's servers end when they mask more than 128 end tokens."""

MAX_TOP_LOGPROBS = 1000
"""The limit at each token: with a whole vocabulary of 150,000, 1,000 tokens would take 15 GB and crash the engine."""


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise EngineRejected for a request that an engine with this vocabulary and context cannot serve.

    The client checks before it sends (an id outside the vocabulary kills a real SGLang server), the server before it
    runs.
    """
    ids, sampling, vocab_size = request.input_ids, request.sampling, info.vocab_size
    if not len(ids):
        raise EngineRejected("input_ids is empty; a request needs at least one token to continue")
    if _largest_id(ids) >= vocab_size:
        position, token_id = next((i, id_) for i, id_ in enumerate(ids) if not 0 <= id_ < vocab_size)
        raise EngineRejected(
            f"input_ids[{position}] is {token_id}, outside the vocabulary of {vocab_size} ids; "
            "use the tokenizer of the model that the engine serves"
        )
    if len(ids) + sampling.max_tokens > info.max_context_tokens:
        raise EngineRejected(
            f"a prompt of {len(ids)} tokens and max_tokens {sampling.max_tokens} exceed the context of "
            f"{info.max_context_tokens} tokens; shorten the prompt, lower max_tokens (max_new_tokens), or raise "
            "engine.max_context_tokens (--max-context)"
        )
    for token_id, _ in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise EngineRejected(
                f"logit_bias names the token id {token_id}, outside the vocabulary of {vocab_size} ids"
            )
    most = min(vocab_size, MAX_TOP_LOGPROBS)
    if not 0 <= request.num_top_logprobs <= most:
        raise EngineRejected(
            f"the number of top log-probabilities is {request.num_top_logprobs}; it must be from 0 (off) to {most}, of "
            f"the {vocab_size} ids of the vocabulary"
        )
    _check_ends(sampling, vocab_size)
    _check_images(request)
    if sampling.grammar is not None and not info.has_grammar:
        name, text = sampling.grammar
        raise EngineRejected(
            f"{name} is {text!r:.80}, but this engine does not constrain answers to a grammar; "
            "leave it out, or use an engine that has one"
        )


def _check_ends(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise EngineRejected for `min_tokens` and `ignore_eos` that no engine can follow, or that would end a server."""
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise EngineRejected(
            f"min_tokens (min_new_tokens) is {sampling.min_tokens}; it must be from 0 (off) to max_tokens "
            f"(max_new_tokens), which is {sampling.max_tokens}"
        )
    if sampling.grammar is not None and (sampling.min_tokens or sampling.ignore_eos):
        name = "min_tokens" if sampling.min_tokens else "ignore_eos"
        raise EngineRejected(
            f"{name} is {getattr(sampling, name)} beside {sampling.grammar[0]}; an answer that is held to a grammar "
            "ends where the grammar says, so leave out one of the two"
        )
    stops = sampling.stop_token_ids if sampling.min_tokens else ()
    if len(stops) > MAX_MASKED_STOPS or any(not 0 <= token_id < vocab_size for token_id in stops):
        raise EngineRejected(
            f"stop_token_ids beside min_tokens {sampling.min_tokens} is {stops!s:.80}; it must hold at most "
            f"{MAX_MASKED_STOPS} ids, each inside the vocabulary of {vocab_size} ids"
        )


def _check_images(request: GenerateRequest) -> None:
    """Raise EngineRejected unless images stand in their order inside the prompt, each on tokens of one id."""
    before = 0
    for span in (image.span for image in request.images):
        ids = set(request.input_ids[span.start : span.end])
        if not before <= span.start < span.end <= len(request.input_ids) or len(ids) > 1:
            raise EngineRejected(
                f"images has a place from {span.start} to {span.end}; it must be after the image before it, which ends "
                f"at {before}, inside of the {len(request.input_ids)} tokens of input_ids, and on tokens of one id"
            )
        before = span.end


def _largest_id(ids: Sequence[int]) -> float:
    """Return the largest id, or more than any vocabulary if one is negative, in a third of the time of `min`, `max`."""
    try:
        return int(np.frombuffer(ids if isinstance(ids, array) else array("i", ids), dtype=np.uintc).max())
    except OverflowError:
        return math.inf


def encode_result(request: GenerateRequest, result: GenerateResult, *, num_sent: int = 0) -> dict[str, Any]:
    """Encode the answer of `/generate`, or the last event of a stream whose earlier events had `num_sent` tokens.

    `text` is empty, because the embedded engine has no tokenizer.
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
    logprobs = get(meta, "output_token_logprobs", list)
    return finished(decode_tokens(get(fields, "output_ids", list), logprobs, top_entries(meta)), meta)


def finished(tokens: TokenChunk, meta: JsonObject) -> GenerateResult:
    """Build the result from all `tokens` and the last `meta_info`."""
    finish = as_object(get(meta, "finish_reason", dict), "finish_reason")
    return GenerateResult(
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        versions=decode_spans(get(meta, "weight_versions", list), len(tokens.token_ids)),
        finish_reason=as_member(FinishReason, get(finish, "type", str), "finish_reason.type"),
        cached_tokens=as_integer(meta.get("cached_tokens", 0), "cached_tokens"),
        top_logprobs=tokens.top_logprobs,
    )


STREAM_END = b"data: [DONE]\n\n"

_PREFIX = b"data:"
_END = b"[DONE]"


def encode_event(body: dict[str, Any]) -> bytes:
    """Encode one event as it is sent over the socket."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def encode_chunk(request_id: str, chunk: TokenChunk, *, num_tokens: int) -> dict[str, Any]:
    """Encode an event that is not the last; `num_tokens` counts all tokens so far, including these."""
    meta = {"id": request_id, "finish_reason": None, "completion_tokens": num_tokens, **encode_logprobs(chunk)}
    if chunk.versions:
        meta["weight_versions"] = encode_spans(chunk.versions, first=num_tokens - len(chunk.token_ids))
    return {"text": "", "output_ids": chunk.token_ids, "meta_info": meta}


def decode_event(data: bytes) -> JsonObject:
    """Decode the object in one event."""
    return as_object(decode_json(data), "an event")


class EventSplitter:
    """Splits bytes, which arrive in pieces of any size, into the data of events, of any length."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of the unfinished line

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that this piece completes, without `[DONE]`, comments and empty lines."""
        first, *rest = piece.split(b"\n")
        self._pieces.append(first)
        if not rest:
            return []
        lines = [b"".join(self._pieces), *rest[:-1]]
        self._pieces = [rest[-1]]
        data = [line[len(_PREFIX) :].strip() for line in lines if line.startswith(_PREFIX)]
        return [event for event in data if event != _END]


class Tokens:
    """The tokens of one answer so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def add(self, chunk: TokenChunk) -> None:
        self.ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs

    def all(self) -> TokenChunk:
        return TokenChunk(
            token_ids=tuple(self.ids), logprobs=tuple(self._logprobs), top_logprobs=tuple(self._top_logprobs)
        )


class ResultReader:
    """Assembles the events of one answer. `result` is set after the last event."""

    is_over = False

    def __init__(self) -> None:
        self.result: GenerateResult | None = None
        self.tokens = Tokens()

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; return its new tokens, if any."""
        meta = as_object(get(fields, "meta_info", dict), "meta_info")
        before, after = len(self.tokens.ids), as_integer(meta.get("completion_tokens"), "completion_tokens")
        tops = top_entries(meta)
        chunk = decode_tokens(
            _new_part(get(fields, "output_ids", list), before, after, "output_ids"),
            _new_part(get(meta, "output_token_logprobs", list), before, after, "output_token_logprobs"),
            _new_part(tops, before, after, "output_top_logprobs") if tops else [],
        )
        chunk = replace(chunk, versions=decode_new_spans(meta, before, after))
        self.tokens.add(chunk)
        if meta.get("finish_reason") is not None:
            self.result = finished(self.tokens.all(), meta)
        return chunk


def _new_part(entries: Sequence[Any], num_before: int, num_after: int, name: str) -> Sequence[Any]:
    """Return the new entries of a list that has either all entries so far or only the new ones."""
    if len(entries) == num_after >= num_before:
        return entries[num_before:]
    if len(entries) == num_after - num_before:
        return entries
    raise WireError(f"{name} has {len(entries)} entries in an event that takes {num_before} tokens to {num_after}")
