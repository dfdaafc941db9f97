"""`sampling_params` of `/generate`: how one completion is sampled, and the bounds of every parameter.

Parameters that are off are not sent. `SamplingParams.stop` never is: texts are cut by the gateway.
"""

from typing import Any, TypeVar

from areal_agent.engine.fields import WireError, as_ids, as_integer, as_number, get, refuse_unknown
from areal_agent.types import JsonObject, SamplingParams

T = TypeVar("T")

MAX_SEED = 2**63 - 1

TEMPERATURES = (1e-6, 1e6)
"""What logits may be divided by, beside 0 for greedy. This and the two below keep them finite in float32."""

MIN_REPETITION_PENALTY = 0.01

MAX_BIAS = 1e6

MAX_ID_DIGITS = 10

_OFF = SamplingParams()
_BOUNDS = {"min_p": (0.0, 1.0), "frequency_penalty": (-2.0, 2.0), "presence_penalty": (-2.0, 2.0)}
_GRAMMARS = ("json_schema", "regex", "ebnf")
_KNOWN = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    *_GRAMMARS,
    "max_new_tokens",
    "stop_token_ids",
    "sampling_seed",
}


def encode_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """The object `sampling_params`."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # 0 is `off` for us and an error for SGLang
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", *_GRAMMARS):
        if getattr(sampling, name) != getattr(_OFF, name):
            params[name] = getattr(sampling, name)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


def decode_sampling(fields: JsonObject) -> SamplingParams:
    """Read `sampling_params`; what is not given is off."""
    refuse_unknown(fields, _KNOWN, "sampling_params")
    grammar = _grammar(fields)
    return SamplingParams(
        temperature=_temperature(fields.get("temperature", 1.0)),
        top_p=_top_p(fields.get("top_p", 1.0)),
        top_k=_top_k(fields.get("top_k", -1)),
        min_p=_bounded(fields, "min_p"),
        frequency_penalty=_bounded(fields, "frequency_penalty"),
        presence_penalty=_bounded(fields, "presence_penalty"),
        repetition_penalty=_repetition_penalty(fields.get("repetition_penalty", 1.0)),
        logit_bias=_logit_bias(_given(fields, "logit_bias", dict)),
        json_schema=grammar.get("json_schema"),
        regex=grammar.get("regex"),
        ebnf=grammar.get("ebnf"),
        max_tokens=_max_tokens(fields.get("max_new_tokens", 128)),
        stop_token_ids=as_ids(_given(fields, "stop_token_ids", list), "stop_token_ids"),
        seed=None if fields.get("sampling_seed") is None else _seed(fields["sampling_seed"]),
    )


def _given(fields: JsonObject, name: str, kind: type[T]) -> T:
    """An empty one where it is off: left out, or null."""
    return kind() if fields.get(name) is None else get(fields, name, kind)


def _temperature(value: object) -> float:
    temperature = as_number(value, "temperature")
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise WireError(f"temperature is {temperature}; it must be 0 (greedy), or from {low:g} to {high:g}")
    return temperature


def _top_p(value: object) -> float:
    top_p = as_number(value, "top_p")
    if not 0 < top_p <= 1:
        raise WireError(f"top_p is {top_p}; it must be above 0 and at most 1 (off)")
    return top_p


def _top_k(value: object) -> int:
    top_k = as_integer(value, "top_k")
    if top_k < 1 and top_k != -1:
        raise WireError(f"top_k is {top_k}; it must be at least 1, or -1 (off)")
    return top_k


def _bounded(fields: JsonObject, name: str) -> float:
    number = as_number(fields.get(name, 0.0), name)
    low, high = _BOUNDS[name]
    if not low <= number <= high:
        raise WireError(f"{name} is {number}; it must be from {low:g} to {high:g}, 0 is off")
    return number


def _repetition_penalty(value: object) -> float:
    penalty = as_number(value, "repetition_penalty")
    if not MIN_REPETITION_PENALTY <= penalty <= 2:
        raise WireError(f"repetition_penalty is {penalty}; it must be from {MIN_REPETITION_PENALTY} to 2, 1 is off")
    return penalty


def _logit_bias(entries: JsonObject) -> tuple[tuple[int, float], ...]:
    for token_id in entries:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= MAX_ID_DIGITS):
            raise WireError(f"logit_bias has the key {token_id!r:.80}; every key must be a token id")
    return tuple((int(token_id), _bias(bias, f"logit_bias of {token_id}")) for token_id, bias in entries.items())


def _bias(value: object, name: str) -> float:
    bias = as_number(value, name)
    if abs(bias) > MAX_BIAS:
        raise WireError(f"{name} is {bias:g}; it must be from -{MAX_BIAS:g} to {MAX_BIAS:g}")
    return bias


def _grammar(fields: JsonObject) -> dict[str, str]:
    given = {name: get(fields, name, str) for name in _GRAMMARS if fields.get(name) is not None}
    if len(given) > 1:
        raise WireError(f"{' and '.join(given)} are given; an answer is held to one of {', '.join(_GRAMMARS)}")
    return given


def _max_tokens(value: object) -> int:
    max_tokens = as_integer(value, "max_new_tokens")
    if max_tokens < 1:
        raise WireError(f"max_new_tokens is {max_tokens}; it must be at least 1")
    return max_tokens


def _seed(value: object) -> int:
    seed = as_integer(value, "sampling_seed")
    if not 0 <= seed <= MAX_SEED:
        raise WireError(f"sampling_seed is {seed}; it must be from 0 to {MAX_SEED}")
    return seed
