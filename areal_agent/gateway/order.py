"""What an endpoint asks of a session: prompts to place in its forest, and how their answers are to be read.

How a request wants to be sampled: what the body says, over what its session says, over the defaults.

What a request of an agent asks for, whatever its endpoint: how many answers, how sampled, where they end.
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


class Question(Protocol):
    """One prompt: it becomes one turn."""

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        """Its place among the turns. Raises RequestError for what the agent did wrong."""
        ...

    def reading(self, renderer: Renderer, prompt: Prompt) -> Reading:
        """How the text of an answer is read."""
        ...


MAX_SEED = 2**63 - 1
MAX_BIAS = 100  # OpenAI's: as good as forbidding a token, or allowing no other
MAX_BIASES = 1024


def _each_once(biases: Mapping[str, float]) -> Mapping[str, float]:
    if len(set(map(int, biases))) < len(biases):
        raise wrong("an object that names each token id once, without leading zeros")
    return biases


Penalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(
        max_length=MAX_BIASES,
        description="By token id, such as {'50256': -100}.",
        json_schema_extra={"additionalProperties": False},
    ),
    AfterValidator(_each_once),
]


class SamplingWishes(Body):
    """Sampling parameters as far as someone asked for them. None means not asked for.

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
    max_tokens: Annotated[PositiveCount, Field(description="Cut to the room that the context has left.")] | None = None

    def require_ids_below(self, vocab_size: int, where: str = "") -> None:
        """Raises RequestError for a bias of a token that the model does not have."""
        largest = max(map(int, self.logit_bias or ()), default=0)
        if largest >= vocab_size:
            refuse(f"{where}logit_bias", {str(largest): "..."}, f"made of token ids below {vocab_size}")

    def over(self, defaults: "SamplingWishes") -> "SamplingWishes":
        """These, and the defaults where these say nothing."""
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
        """What the engine is asked for: at most the `num_room` tokens that the context has left."""
        said = self._said()
        said["max_tokens"] = num_room if self.max_tokens is None else min(self.max_tokens, num_room)
        if self.logit_bias is not None:
            said["logit_bias"] = tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items())
        return SamplingParams(**said, stop_token_ids=stop_token_ids, stop=stop, seed=seed, json_schema=json_schema)

    def _said(self) -> dict[str, Any]:
        return {name: value for name in _NAMES & self.model_fields_set if (value := getattr(self, name)) is not None}


_NAMES = frozenset(SamplingWishes.model_fields)


MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

Stop = Annotated[
    Annotated[Name, Tag("a string")] | Annotated[list[Name], Field(max_length=MAX_STOPS), Tag("a list")],
    Discriminator(json_kind),
]


class StreamOptions(Body):
    """How a stream leaves."""

    include_usage: bool = Field(default=False, description="The last chunk tells the usage.")
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class Order(SamplingWishes):
    """A checked body of an endpoint: the fields that chat completions and completions share."""

    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]  # the parameter that holds its prompts

    model: str
    num_choices: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = Field(default=1, alias="n")
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED), AfterValidator(lambda seed: seed & MAX_SEED)] | None = (
        None
    )
    is_streamed: bool = Field(default=False, alias="stream")
    stream_options: StreamOptions | None = None
    has_token_ids: bool = Field(
        default=False, alias="return_token_ids", description="An extension: the ids of prompt and answers."
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
        """Whether the last chunk of a stream tells the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell at each position; None when no log-probabilities are asked for."""

    @property
    @abstractmethod
    def json_schema(self) -> str | None:
        """The schema, as text, that every answer must match."""

    @property
    @abstractmethod
    def is_single_call(self) -> bool:
        """Whether an answer ends with its first tool call."""

    @abstractmethod
    def questions(self) -> Sequence[Question]:
        """Its prompts, at least one."""
