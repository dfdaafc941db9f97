"""What a request asks for, whichever protocol it came in: an `Order` of one or more questions, and how to sample.

::

    ChatRequest ─┐
    Responses   ─┼─ order() ─▶ Order ─▶ session, turn, forest ─▶ Answer ─▶ the protocol's writer
    Messages    ─┘

A sampling parameter comes from the request, else from the session, else from the defaults (`SamplingWishes.over`). A
session that overrides sampling ignores what a request says about it, but for lengths.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from areal_agent.gateway.bodies import (
    MAX_COUNT,
    Body,
    Count,
    Harmless,
    Name,
    Number,
    PositiveCount,
    Unsupported,
    json_kind,
    refuse,
    wrong,
)
from areal_agent.gateway.draft import Reading
from areal_agent.tokens.forest import Forest, Prompt
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import SamplingParams, record

MAX_SEED = 2**63 - 1
MAX_BIAS = 100  # OpenAI's limit: in effect it forbids a token or allows no other
MAX_BIASES = 1024

DEFAULT_MODEL = "default"
"""A model name that every gateway accepts, for agents that do not know the real one."""

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

    def takes_one_call(self, renderer: Renderer) -> bool:
        """Return whether an answer has to end with its first call, because later prompts could not hold another."""
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
    min_tokens: Annotated[Count, Field(description="No end token is sampled before so many.")] | None = None
    stop_token_ids: (
        Annotated[list[Number], Field(max_length=MAX_BIASES, description="Ids that end an answer, beside the model's.")]
        | None
    ) = None
    ignore_eos: bool | None = Field(default=None, description="The model's own end tokens do not end an answer.")

    def require_possible(self, vocab_size: int, where: str = "") -> None:
        """Raise RequestError for limits that contradict each other, and for tokens that the model does not have."""
        if self.min_tokens is not None and self.min_tokens > (self.max_tokens or self.min_tokens):
            refuse(f"{where}min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        largest = max(map(int, self.logit_bias or ()), default=0)
        if largest >= vocab_size:
            refuse(f"{where}logit_bias", {str(largest): "..."}, f"made of token ids below {vocab_size}")
        if max(self.stop_token_ids or (0,)) >= vocab_size:
            refuse(f"{where}stop_token_ids", self.stop_token_ids, f"made of token ids below {vocab_size}")

    def over(self, defaults: "SamplingWishes", *, only_lengths: bool = False) -> "SamplingWishes":
        """Return these wishes (or `only_lengths` of them), with `defaults` for the parameters they leave out."""
        said = self._said()
        if only_lengths:
            said = {name: value for name, value in said.items() if name in LENGTHS}
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
        """Return the engine's sampling parameters, with at most `num_room` tokens, the room left in the context.

        `stop_token_ids` are the model's own.
        """
        said = self._said()
        said["max_tokens"] = num_room if self.max_tokens is None else min(self.max_tokens, num_room)
        if self.min_tokens is not None:
            said["min_tokens"] = min(self.min_tokens, said["max_tokens"])
        if self.ignore_eos:
            stop_token_ids = ()
        stop_token_ids += tuple(said.pop("stop_token_ids", ()))
        if self.logit_bias is not None:
            said["logit_bias"] = tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items())
        return SamplingParams(**said, stop_token_ids=stop_token_ids, stop=stop, seed=seed, json_schema=json_schema)

    def _said(self) -> dict[str, Any]:
        return {name: value for name in _NAMES & self.model_fields_set if (value := getattr(self, name)) is not None}


_NAMES = frozenset(SamplingWishes.model_fields)

LENGTHS = frozenset({"max_tokens", "stop_token_ids", "ignore_eos"})
"""The parameters that say where an answer ends. They do not change what a token's recorded probability means."""

Stop = Annotated[
    Annotated[Name, Tag("a string")] | Annotated[list[Name], Field(max_length=MAX_STOPS), Tag("a list")],
    Discriminator(json_kind),
]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="The last chunk carries the usage.")
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class OrderBody(SamplingWishes):
    """The fields that the bodies of chat completions and completions share."""

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


@record
class Order:
    """One request for answers. It is all that a session and its turns know of a request.

    `schema_param` and `prompt_param` are the request's names for what errors speak about.
    """

    id_prefix: str  # of the answer's id, with its separator: "chatcmpl-"
    model: str
    prompt_param: str
    questions: Sequence[Question]  # at least one
    wishes: SamplingWishes
    num_choices: int = 1  # answers to each question
    stops: tuple[str, ...] = ()  # texts that end an answer
    seed: int | None = None
    num_top_logprobs: int | None = None  # likeliest tokens per position; None: no log-probabilities are asked for
    json_schema: str | None = None  # as text; every answer must match it
    schema_param: str = "response_format"
    is_single_call: bool = False  # an answer ends with its first tool call
    is_streamed: bool = False
    is_kept: bool = False  # a later request may name the answer instead of repeating the conversation
