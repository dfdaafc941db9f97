"""The parameters that both completion endpoints share: how many answers, how to sample them, and where they end.

A sampling parameter comes from the request, else from the session, else from the defaults (`SamplingWishes.over`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from areal_agent.gateway.bodies import (
    MAX_COUNT,
    Body,
    Harmless,
    Name,
    PositiveCount,
    Unsupported,
    json_kind,
    refuse,
    wrong,
)
from areal_agent.gateway.draft import Reading
from areal_agent.tokens.forest import Forest, Prompt
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import SamplingParams

MAX_SEED = 2**63 - 1
MAX_BIAS = 100  # OpenAI's limit: in effect it forbids a token or allows no other
MAX_BIASES = 1024

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20


class Question(Protocol):
    """One prompt of a request; it becomes one turn."""

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        """Place the prompt among the session's turns. Raises RequestError for the agent's mistakes."""
        ...

    def reading(self, renderer: Renderer, prompt: Prompt) -> Reading:
        """Return the way to read the text of an answer."""
        ...


def _each_once(biases: Mapping[str, float]) -> Mapping[str, float]:
    if len(set(map(int, biases))) < len(biases):
        raise wrong("an object that names each token id once, without leading zeros")
    return biases


Penalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(
        max_length=MAX_BIASES,
        description="Biases by token id, for example {'50256': -100}.",
        json_schema_extra={"additionalProperties": False},
    ),
    AfterValidator(_each_once),
]


class SamplingWishes(Body):
    """Sampling parameters, as far as the caller set them. None means the default.

    >>> wishes = SamplingWishes(temperature=0.5).over(SamplingWishes(temperature=1.0, max_tokens=8))
    >>> wishes.temperature, wishes.max_tokens, wishes.top_p
    (0.5, 8, None)
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT), AfterValidator(lambda top_k: top_k or -1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Annotated[PositiveCount, Field(description="Reduced to the room left in the context.")] | None = None

    def require_ids_below(self, vocab_size: int, where: str = "") -> None:
        """Raise RequestError for a bias on a token that the model does not have."""
        largest = max(map(int, self.logit_bias or ()), default=0)
        if largest >= vocab_size:
            refuse(f"{where}logit_bias", {str(largest): "..."}, f"made of token ids below {vocab_size}")

    def over(self, defaults: "SamplingWishes") -> "SamplingWishes":
        """Return these wishes, with `defaults` for the parameters they leave out."""
        said = self._said()
        return defaults.model_copy(update=said) if said else defaults

    def params(
        self,
        *,
        num_room: int,
        stop_token_ids: tuple[int, ...],
        stop: tuple[str, ...] = (),
        seed: int,
        json_schema: str | None = None,
    ) -> SamplingParams:
        """Return the engine's sampling parameters, with at most `num_room` tokens, the room left in the context."""
        said = self._said()
        said["max_tokens"] = num_room if self.max_tokens is None else min(self.max_tokens, num_room)
        if self.logit_bias is not None:
            said["logit_bias"] = tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items())
        return SamplingParams(**said, stop_token_ids=stop_token_ids, stop=stop, seed=seed, json_schema=json_schema)

    def _said(self) -> dict[str, Any]:
        return {name: value for name in _NAMES & self.model_fields_set if (value := getattr(self, name)) is not None}


_NAMES = frozenset(SamplingWishes.model_fields)

Stop = Annotated[
    Annotated[Name, Tag("a string")] | Annotated[list[Name], Field(max_length=MAX_STOPS), Tag("a list")],
    Discriminator(json_kind),
]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="The last chunk carries the usage.")
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class Order(SamplingWishes):
    """The fields that the bodies of chat completions and completions share."""

    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]  # the parameter that holds the prompts

    model: str
    num_choices: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = Field(default=1, alias="n")
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED), AfterValidator(lambda seed: seed & MAX_SEED)] | None = (
        None
    )
    is_streamed: bool = Field(default=False, alias="stream")
    stream_options: StreamOptions | None = None
    has_token_ids: bool = Field(
        default=False, alias="return_token_ids", description="An extension: return the token ids of prompt and answers."
    )

    user: Harmless = None
    metadata: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_options: Harmless = None
    prompt_cache_retention: Harmless = None

    @model_validator(mode="after")
    def _has_options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.is_streamed:
            refuse("stream_options", self.stream_options.model_dump(), "left out where stream is not true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_usage_chunk(self) -> bool:
        """True if the last chunk of a stream carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int | None:
        """The number of likeliest tokens to return per position; None when no log-probabilities are asked for."""

    @property
    @abstractmethod
    def json_schema(self) -> str | None:
        """The schema, as text, that every answer must match."""

    @property
    @abstractmethod
    def is_single_call(self) -> bool:
        """True if an answer ends with its first tool call."""

    @abstractmethod
    def questions(self) -> Sequence[Question]:
        """Return the prompts, at least one."""
