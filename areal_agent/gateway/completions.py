"""`/v1/completions`: the body of a request. Each prompt is a turn of its own; its answer is plain text.

A prompt that begins with a recorded prompt and its answer, as text or as ids, continues it.

The answer to `/v1/completions` as JSON: a `text_completion` object, at once or in chunks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Answer, Choice, completion_logprobs
from areal_agent.gateway.bodies import as_flag, as_integer, as_list, as_text, refuse
from areal_agent.gateway.draft import Piece, PlainReading, TokenRow
from areal_agent.gateway.order import (
    HARMLESS_FIELDS,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    ORDER_FIELDS,
    Order,
    Question,
    refuse_unsupported,
)
from areal_agent.gateway.turn import Exchange
from areal_agent.tokens.forest import Forest, Prompt
from areal_agent.tokens.renderer import Detokenizer, Renderer
from areal_agent.types import JsonObject

_HONOURED = (ORDER_FIELDS | {"prompt", "echo"}) - {"max_completion_tokens"}
_KNOWN = _HONOURED | HARMLESS_FIELDS

_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
}
"""Not supported: the values beside null with which they ask for nothing."""

PromptText = str | tuple[int, ...]
"""A prompt as text, or as token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionsRequest:
    """A checked body."""

    model: str
    prompts: tuple[PromptText, ...]
    is_echoed: bool
    order: Order

    id_prefix = "cmpl"
    prompt_param = "prompt"
    json_schema = None
    is_single_call = False

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        """Check a decoded body; raises RequestError naming the parameter that cannot be honoured."""
        refuse_unsupported(body, _KNOWN, _UNSUPPORTED)
        logprobs = body.get("logprobs")
        order = Order.read(
            body,
            num_top_logprobs=None
            if logprobs is None
            else as_integer(logprobs, "logprobs", low=0, high=MAX_TOP_LOGPROBS),
        )
        is_echoed = as_flag(body.get("echo"), "echo")
        if is_echoed and order.num_top_logprobs is not None:
            raise RequestError(
                "echo together with logprobs asks for the log-probabilities of the prompt, which this gateway does "
                "not have; leave one of them out",
                param="echo",
                code="unsupported_parameter",
            )
        prompts = _read_prompts(body.get("prompt"))
        if len(prompts) * order.num_choices > MAX_CHOICES:
            refuse("n", order.num_choices, f"at most {MAX_CHOICES} over all prompts, of which there are {len(prompts)}")
        return cls(model=as_text(body.get("model"), "model"), prompts=prompts, is_echoed=is_echoed, order=order)

    def questions(self) -> tuple[Question, ...]:
        return tuple(_Completion(prompt) for prompt in self.prompts)

    def echoes(self, renderer: Renderer) -> tuple[str, ...]:
        """What each prompt is echoed as."""
        if not self.is_echoed:
            return ("",) * len(self.prompts)
        return tuple(one if isinstance(one, str) else renderer.detokenizer.text_of(one) for one in self.prompts)


class _Completion:
    """One prompt."""

    def __init__(self, prompt: PromptText) -> None:
        self._prompt = prompt

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        if not isinstance(self._prompt, str) and max(self._prompt) >= renderer.vocab_size:
            refuse("prompt", max(self._prompt), f"made of token ids below {renderer.vocab_size}")
        return forest.plan_completion(self._prompt)

    def reading(self, renderer: Renderer, prompt: Prompt) -> PlainReading:
        return PlainReading()


def _read_prompts(value: object) -> tuple[PromptText, ...]:
    if isinstance(value, str):
        return (_read_prompt(value, "prompt"),)
    values = as_list(value, "prompt")
    if not values:
        refuse("prompt", value, "a text, a list of token ids, or a list of either that is not empty")
    if not isinstance(values[0], str | list):
        return (_read_prompt(values, "prompt"),)
    return tuple(_read_prompt(one, f"prompt[{index}]") for index, one in enumerate(values))


def _read_prompt(value: object, param: str) -> PromptText:
    if isinstance(value, str):
        return value or refuse(param, value, "a text that is not empty")
    ids = as_list(value, param)
    if not ids or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        refuse(param, value, "a text, or a list of token ids that is not empty")
    return tuple(cast("list[int]", ids))


class CompletionsBody:
    """Writes the answer to one exchange. `echoes`: what comes before the answers to each prompt."""

    def __init__(self, exchange: Exchange, detokenizer: Detokenizer, echoes: Sequence[str]) -> None:
        self._order = exchange.order
        self._detokenizer = detokenizer
        self._echoes = echoes
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
        if self._order.has_token_ids:
            body |= {"prompt_token_ids": list(prompt_ids), "token_ids": choice.completion.token_ids}
        return body

    # --------------------------------------------------------------------------------------- in chunks

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]:
        """Before anything is sampled: the echo."""
        for index in range(self._num_choices):
            if self._echo(index):
                yield self._chunk(self._choice_body(index, self._echo(index), ()))

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """What one answer gained."""
        gain = piece.gain
        body = self._choice_body(piece.index, "".join(delta.content for delta in gain.deltas), gain.rows)
        if self._order.has_token_ids:
            body["token_ids"] = gain.token_ids
        yield self._chunk(body)

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """When all is recorded: why each answer ended, and the usage if that was asked for."""
        for choice, prompt_ids in _with_prompts(answer):
            body = self._choice_body(choice.index, "", ())
            body["finish_reason"] = choice.completion.finish_reason.value
            if self._order.has_token_ids:
                body["prompt_token_ids"] = list(prompt_ids)
            yield self._chunk(body)
        if self._order.has_usage_chunk:
            yield {**self._head, "choices": [], "usage": answer.usage()}

    def _chunk(self, choice: JsonObject) -> JsonObject:
        chunk = {**self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._order.has_usage_chunk else chunk

    def _choice_body(self, index: int, text: str, rows: Sequence[TokenRow]) -> dict[str, Any]:
        num_top = self._order.num_top_logprobs
        logprobs = (
            None
            if num_top is None
            else completion_logprobs(rows, num_top, self._detokenizer, first_offset=len(self._echo(index)))
        )
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._order.num_choices]


def _with_prompts(answer: Answer) -> Iterator[tuple[Choice, Sequence[int]]]:
    for turn in answer.turns:
        for choice in turn.choices:
            yield choice, turn.prompt_ids
