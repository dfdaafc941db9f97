"""What an endpoint asks of a session: prompts to place in its forest, and how their answers are to be read.

How a request wants to be sampled: what the body says, over what its session says, over the defaults.

What a request orders, whatever its endpoint: how many answers, how sampled, where they end, how they leave.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import (
    as_bounded_number,
    as_flag,
    as_integer,
    as_list,
    as_name,
    as_object,
    refuse,
    refuse_unknown,
)
from areal_agent.gateway.draft import Reading
from areal_agent.tokens.forest import Forest, Prompt
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import JsonObject, SamplingParams

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_BIAS = 100  # OpenAI's: as good as forbidding a token, or allowing no other
MAX_BIASES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingWishes:
    """Sampling parameters as far as someone asked for them; None: not asked for.

    >>> wishes = SamplingWishes(temperature=0.5).over(SamplingWishes(temperature=1.0, max_tokens=8))
    >>> wishes.temperature, wishes.max_tokens, wishes.top_p
    (0.5, 8, None)
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    max_tokens: int | None = None

    @classmethod
    def read(cls, body: JsonObject, where: str = "") -> Self:
        """Take them from a body; raises RequestError naming the one that is wrong."""
        if body.keys().isdisjoint(_KEYS):
            return cls()
        return cls(
            temperature=_read_number(body, where, "temperature", low=0, high=2),
            top_p=_read_positive(body, where, "top_p", high=1),
            top_k=_read_top_k(body, where),
            min_p=_read_number(body, where, "min_p", low=0, high=1),
            frequency_penalty=_read_number(body, where, "frequency_penalty", low=-2, high=2),
            presence_penalty=_read_number(body, where, "presence_penalty", low=-2, high=2),
            repetition_penalty=_read_positive(body, where, "repetition_penalty", high=2),
            logit_bias=_read_logit_bias(body, where),
            max_tokens=_read_max_tokens(body, where),
        )

    def require_ids_below(self, vocab_size: int, where: str = "") -> None:
        """Raises RequestError for a bias of a token that the model does not have."""
        largest = max((token_id for token_id, _ in self.logit_bias or ()), default=0)
        if largest >= vocab_size:
            refuse(f"{where}logit_bias", {str(largest): "..."}, f"made of token ids below {vocab_size}")

    def over(self, defaults: "SamplingWishes") -> "SamplingWishes":
        """These, and the defaults where these say nothing."""
        said = self._said()
        return replace(defaults, **said) if said else defaults

    def params(
        self,
        *,
        num_room: int,
        stop_token_ids: tuple[int, ...],
        stop: tuple[str, ...] = (),
        seed: int,
        json_schema: str | None = None,
    ) -> SamplingParams:
        """What the engine is asked for: at most the `num_room` tokens that the context has left."""
        said = self._said()
        said["max_tokens"] = num_room if self.max_tokens is None else min(self.max_tokens, num_room)
        return SamplingParams(**said, stop_token_ids=stop_token_ids, stop=stop, seed=seed, json_schema=json_schema)

    def _said(self) -> dict[str, Any]:
        return {name: value for name in _NAMES if (value := getattr(self, name)) is not None}


_NAMES = tuple(field.name for field in fields(SamplingWishes))

WISH_FIELDS = frozenset(_NAMES)

_KEYS = WISH_FIELDS | {"max_completion_tokens"}


def _read_number(body: JsonObject, where: str, name: str, *, low: float, high: float) -> float | None:
    value = body.get(name)
    return None if value is None else as_bounded_number(value, where + name, low=low, high=high)


def _read_positive(body: JsonObject, where: str, name: str, *, high: float) -> float | None:
    number = _read_number(body, where, name, low=0, high=high)
    return refuse(where + name, body[name], "greater than 0") if number == 0 else number


def _read_top_k(body: JsonObject, where: str) -> int | None:
    top_k = body.get("top_k")
    return None if top_k is None else as_integer(top_k, where + "top_k", low=-1, high=MAX_TOKENS) or -1


def _read_logit_bias(body: JsonObject, where: str) -> tuple[tuple[int, float], ...] | None:
    if body.get("logit_bias") is None:
        return None
    param = where + "logit_bias"
    biases = as_object(body["logit_bias"], param)
    if len(biases) > MAX_BIASES:
        refuse(param, f"an object of {len(biases)} entries", f"one of at most {MAX_BIASES}")
    by_id = {
        _read_token_id(key, param): as_bounded_number(bias, f"{param}[{key}]", low=-MAX_BIAS, high=MAX_BIAS)
        for key, bias in biases.items()
    }
    if len(by_id) < len(biases):
        refuse(param, biases, "an object that names each token id once, without leading zeros")
    return tuple(by_id.items())


def _read_token_id(key: str, param: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        refuse(param, {key: "..."}, "an object whose keys are token ids, such as {'50256': -100}")
    return int(key)


def _read_max_tokens(body: JsonObject, where: str) -> int | None:
    limits = {
        name: as_integer(body[name], where + name, low=1, high=MAX_TOKENS)
        for name in ("max_completion_tokens", "max_tokens")
        if body.get(name) is not None
    }
    if len(set(limits.values())) > 1:
        refuse(where + "max_tokens", limits["max_tokens"], f"max_completion_tokens ({limits['max_completion_tokens']})")
    return next(iter(limits.values()), None)


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


class Question(Protocol):
    """One prompt: it becomes one turn."""

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        """Its place among the turns. Raises RequestError for what the agent did wrong."""
        ...

    def reading(self, renderer: Renderer, prompt: Prompt) -> Reading:
        """How the text of an answer is read."""
        ...


class Request(Protocol):
    """A checked body of an endpoint."""

    @property
    def model(self) -> str: ...

    @property
    def order(self) -> Order: ...

    @property
    def json_schema(self) -> str | None:
        """What every answer must match."""
        ...

    @property
    def is_single_call(self) -> bool:
        """Whether an answer ends with its first tool call."""
        ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def prompt_param(self) -> str:
        """The parameter that holds its prompts."""
        ...

    def questions(self) -> Sequence[Question]:
        """Its prompts, at least one."""
        ...
