"""What a request orders, whatever its endpoint: how many answers, how sampled, where they end, how they leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.gateway.fields import (
    as_flag,
    as_integer,
    as_list,
    as_name,
    as_object,
    refuse,
    refuse_unknown,
)
from areal_agent.gateway.sampling import MAX_SEED, WISH_FIELDS, SamplingWishes
from areal_agent.types import JsonObject

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

ORDER_FIELDS = WISH_FIELDS | {
    "model",
    "max_completion_tokens",
    "seed",
    "n",
    "stop",
    "logprobs",
    "stream",
    "stream_options",
    "return_token_ids",
}

HARMLESS_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
"""They say nothing about the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What is asked of the answers. `num_top_logprobs` 0: the log-probability of the sampled token alone."""

    wishes: SamplingWishes
    seed: int | None
    num_choices: int
    stops: tuple[str, ...]
    num_top_logprobs: int | None  # None: no log-probabilities
    is_streamed: bool
    has_usage_chunk: bool  # the last chunk of a stream tells the usage
    has_token_ids: bool  # a vendor extension: the ids of prompt and answers

    @classmethod
    def read(cls, body: JsonObject, *, num_top_logprobs: int | None) -> Self:
        """Take it from a body; raises RequestError naming the parameter that is wrong."""
        seed, num_choices = body.get("seed"), body.get("n")
        is_streamed = as_flag(body.get("stream"), "stream")
        return cls(
            wishes=SamplingWishes.read(body),
            seed=None if seed is None else as_integer(seed, "seed", low=-MAX_SEED - 1, high=MAX_SEED) & MAX_SEED,
            num_choices=1 if num_choices is None else as_integer(num_choices, "n", low=1, high=MAX_CHOICES),
            stops=_read_stops(body.get("stop")),
            num_top_logprobs=num_top_logprobs,
            is_streamed=is_streamed,
            has_usage_chunk=_read_stream_options(body.get("stream_options"), is_streamed=is_streamed),
            has_token_ids=as_flag(body.get("return_token_ids"), "return_token_ids"),
        )


def refuse_unsupported(body: JsonObject, known: frozenset[str], unsupported: Mapping[str, Sequence[object]]) -> None:
    """Refuse names that are not known, and those not supported whose value is not one that asks for nothing."""
    if body.keys() <= known:
        return
    refuse_unknown(body, known | unsupported.keys())
    for name in unsupported.keys() & body.keys():
        value = body[name]
        if value is not None and value not in unsupported[name]:
            raise RequestError(
                f"{name}={value!r:.200} is not supported by this gateway; leave it out",
                param=name,
                code="unsupported_parameter",
            )


def _read_stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (as_name(value, "stop"),)
    stops = as_list(value, "stop")
    if len(stops) > MAX_STOPS:
        refuse("stop", value, f"at most {MAX_STOPS} texts")
    return tuple(as_name(stop, f"stop[{index}]") for index, stop in enumerate(stops))


def _read_stream_options(value: object, *, is_streamed: bool) -> bool:
    if value is None:
        return False
    if not is_streamed:
        refuse("stream_options", value, "left out where stream is not true")
    options = as_object(value, "stream_options")
    refuse_unknown(options, ("include_usage", "include_obfuscation"), "stream_options.")
    if options.get("include_obfuscation"):
        raise RequestError(
            "stream_options.include_obfuscation is not supported by this gateway; leave it out",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    return as_flag(options.get("include_usage"), "stream_options.include_usage")
