"""The answer to `/v1/completions` as JSON: a `text_completion` object, at once or in chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from areal_agent.gateway.endpoints.logprobs import completion_logprobs
from areal_agent.gateway.turns.answer import Answer
from areal_agent.gateway.turns.choice import Choice
from areal_agent.gateway.turns.draft import TokenRow
from areal_agent.gateway.turns.exchange import Exchange
from areal_agent.gateway.turns.outlet import Piece
from areal_agent.tokens.detokenizer import Detokenizer
from areal_agent.types import JsonObject


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
