"""`/v1/completions`: `CompletionsRequest` is the body of a request, `CompletionsBody` writes the answer.

Each prompt is a turn of its own and its answer is plain text. A prompt that begins with a recorded prompt and its
answer, as text or as ids, continues that turn.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Answer, Choice, completion_logprobs
from areal_agent.gateway.bodies import Count, Unsupported, json_kind, refuse
from areal_agent.gateway.draft import Piece, PlainReading, TokenRow
from areal_agent.gateway.order import MAX_CHOICES, MAX_TOP_LOGPROBS, Order, OrderBody
from areal_agent.gateway.server import DONE, error_object
from areal_agent.gateway.turn import Exchange
from areal_agent.tokens.forest import Forest, Prompt
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import JsonObject


def _kind(value: object) -> str:
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return json_kind(value)
    return "a list of prompts"


PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    Annotated[PromptText, Tag("a string")]
    | Annotated[PromptIds, Tag("a list")]
    | Annotated[
        list[
            Annotated[
                Annotated[PromptText, Tag("a string")] | Annotated[PromptIds, Tag("a list")], Discriminator(json_kind)
            ]
        ],
        Field(min_length=1, fail_fast=True),
        Tag("a list of prompts"),
    ],
    Discriminator(_kind),
    Field(description="One prompt or a list of them, each as text or as token ids."),
]


class CompletionsRequest(OrderBody):
    """The body of a completion request."""

    prompt: Prompts
    is_echoed: bool = Field(default=False, alias="echo")
    max_tokens: Annotated[Count, Field(description="Reduced to the room left. 0 only with `echo`: no turn.")] | None = (
        None
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    suffix: Annotated[Any, Unsupported("")] = None
    best_of: Annotated[Any, Unsupported(1)] = None
    store: Annotated[Any, Unsupported(False)] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.is_echoed and self.logprobs is not None:
            raise RequestError(
                "echo together with logprobs asks for the log-probabilities of the prompt, which this gateway does "
                "not have; leave one of them out",
                param="echo",
                code="unsupported_parameter",
            )
        if self.max_tokens == 0 and not self.is_echoed:
            refuse("max_tokens", 0, "at least 1, or sent together with echo=true")
        num_prompts = len(self.prompts)
        if num_prompts * self.num_choices > MAX_CHOICES:
            refuse("n", self.num_choices, f"at most {MAX_CHOICES} over all prompts, of which there are {num_prompts}")
        return self

    @property
    def prompts(self) -> tuple[str | list[int], ...]:
        """The prompts, each as text or token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (cast("list[int]", self.prompt),)
        return tuple(cast("list[str | list[int]]", self.prompt))

    def order(self) -> Order:
        return Order(
            id_prefix="cmpl-",
            model=self.model,
            prompt_param="prompt",
            questions=[_Completion(prompt) for prompt in self.prompts],
            is_streamed=self.is_streamed,
            wishes=self,
            num_choices=self.num_choices,
            stops=self.stops,
            seed=self.seed,
            num_top_logprobs=self.logprobs,
        )

    def echoes(self, renderer: Renderer) -> tuple[str, ...]:
        """Return the echo of each prompt; empty texts without `echo`."""
        if not self.is_echoed:
            return ("",) * len(self.prompts)
        return tuple(one if isinstance(one, str) else renderer.detokenizer.text_of(one) for one in self.prompts)


class _Completion:
    """One prompt of a request."""

    def __init__(self, prompt: str | list[int]) -> None:
        self._prompt = prompt

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        if not isinstance(self._prompt, str) and max(self._prompt) >= renderer.vocab_size:
            refuse("prompt", max(self._prompt), f"made of token ids below {renderer.vocab_size}")
        return forest.plan_completion(self._prompt)

    def reading(self, renderer: Renderer, prompt: Prompt) -> PlainReading:
        return PlainReading()

    def takes_one_call(self, renderer: Renderer) -> bool:
        return False


class CompletionsBody:
    """Writes the answer to one exchange."""

    names_events = False
    done = DONE
    fault = staticmethod(error_object)

    def __init__(self, request: CompletionsRequest, exchange: Exchange, renderer: Renderer) -> None:
        self._request = request
        self._detokenizer = renderer.detokenizer
        self._echoes = request.echoes(renderer)
        self._num_choices = exchange.num_choices
        self._head = {
            "id": exchange.answer_id,
            "object": "text_completion",
            "created": exchange.created_s,
            "model": exchange.model,
        }

    # ------------------------------------------------------------------------------------------ at once

    def whole(self, answer: Answer) -> JsonObject:
        choices = [self._choice(choice, prompt_ids) for choice, prompt_ids in _with_prompts(answer)]
        return {**self._head, "choices": choices, "usage": answer.usage()}

    def _choice(self, choice: Choice, prompt_ids: Sequence[int]) -> JsonObject:
        echo = self._echo(choice.index)
        body = self._choice_body(choice.index, echo + choice.text, choice.rows)
        body["finish_reason"] = choice.completion.finish_reason.value
        if self._request.has_token_ids:
            body |= {"prompt_token_ids": list(prompt_ids), "token_ids": choice.completion.token_ids}
        return body

    # --------------------------------------------------------------------------------------- in chunks

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]:
        """Yield the echoes, before anything is sampled."""
        for index in range(self._num_choices):
            if self._echo(index):
                yield self._chunk(self._choice_body(index, self._echo(index), ()))

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield the chunk for one answer's gain."""
        gain = piece.gain
        body = self._choice_body(piece.index, "".join(delta.content for delta in gain.deltas), gain.rows)
        if self._request.has_token_ids:
            body["token_ids"] = gain.token_ids
        yield self._chunk(body)

    def idle(self) -> JsonObject:
        """Return a chunk without text."""
        return self._chunk(self._choice_body(0, "", ()))

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """Yield the finish reasons, and the usage if asked for, once everything is recorded."""
        for choice, prompt_ids in _with_prompts(answer):
            body = self._choice_body(choice.index, "", ())
            body["finish_reason"] = choice.completion.finish_reason.value
            if self._request.has_token_ids:
                body["prompt_token_ids"] = list(prompt_ids)
            yield self._chunk(body)
        if self._request.has_usage_chunk:
            yield {**self._head, "choices": [], "usage": answer.usage()}

    def _chunk(self, choice: JsonObject) -> JsonObject:
        chunk = {**self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._request.has_usage_chunk else chunk

    def _choice_body(self, index: int, text: str, rows: Sequence[TokenRow]) -> dict[str, Any]:
        num_top = self._request.logprobs
        logprobs = (
            None
            if num_top is None
            else completion_logprobs(rows, num_top, self._detokenizer, first_offset=len(self._echo(index)))
        )
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._request.num_choices]


def _with_prompts(answer: Answer) -> Iterator[tuple[Choice, Sequence[int]]]:
    for turn in answer.turns:
        for choice in turn.choices:
            yield choice, turn.prompt_ids
