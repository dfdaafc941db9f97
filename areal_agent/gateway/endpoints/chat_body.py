"""The answer to a chat as JSON: a `chat.completion` object, or the chunks of a stream."""

from collections.abc import Iterator, Sequence
from typing import Any

from areal_agent.gateway.endpoints.logprobs import chat_logprobs
from areal_agent.gateway.turns.answer import Answer
from areal_agent.gateway.turns.choice import Choice, call_id, completion_ids
from areal_agent.gateway.turns.draft import Gain, TokenRow
from areal_agent.gateway.turns.exchange import Exchange
from areal_agent.gateway.turns.outlet import Piece
from areal_agent.tokens.answers.parsed import AnswerDelta, ToolCall
from areal_agent.tokens.detokenizer import Detokenizer
from areal_agent.types import JsonObject


class ChatBody:
    """Writes the answer to one exchange."""

    def __init__(self, exchange: Exchange, detokenizer: Detokenizer) -> None:
        self._order = exchange.order
        self._detokenizer = detokenizer
        self._completion_ids = completion_ids(exchange.answer_id, exchange.num_choices)
        self._head = {"id": exchange.answer_id, "created": exchange.created_s, "model": exchange.model}

    # ------------------------------------------------------------------------------------------ at once

    def whole(self, answer: Answer) -> JsonObject:
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in answer.choices],
            "usage": answer.usage(),
        }
        if self._order.has_token_ids:
            body["prompt_token_ids"] = list(answer.turns[0].prompt_ids)
        return body

    def _choice(self, choice: Choice) -> JsonObject:
        body: dict[str, Any] = {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": self._logprobs(choice.rows),
            "finish_reason": choice.finish_reason,
        }
        if self._order.has_token_ids:
            body["token_ids"] = choice.completion.token_ids
        return body

    # --------------------------------------------------------------------------------------- in chunks

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]:
        """Before any text: who speaks."""
        for index in range(len(self._completion_ids)):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if self._order.has_token_ids and index == 0:
                chunk["prompt_token_ids"] = list(prompt_ids)
            yield chunk

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """What one answer gained: a chunk for each delta, the tokens with the first."""
        for number, delta in enumerate(piece.gain.deltas):
            body = _delta(delta, self._completion_ids[piece.index])
            yield self._chunk(piece.index, body, piece.gain if number == 0 else None)
        if not piece.gain.deltas and self._tells_tokens(piece.gain):
            yield self._chunk(piece.index, {}, piece.gain)

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """When all is recorded: why each answer ended, and the usage if that was asked for."""
        for choice in answer.choices:
            chunk = self._chunk(choice.index, {})
            chunk["choices"][0]["finish_reason"] = choice.finish_reason
            yield chunk
        if self._order.has_usage_chunk:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": answer.usage()}

    def _chunk(self, index: int, delta: JsonObject, gain: Gain | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if gain is not None:
            choice["logprobs"] = self._logprobs(gain.rows)
            if self._order.has_token_ids:
                choice["token_ids"] = gain.token_ids
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._order.has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _tells_tokens(self, gain: Gain) -> bool:
        has_logprobs = self._order.num_top_logprobs is not None and bool(gain.rows)
        return has_logprobs or (self._order.has_token_ids and bool(gain.token_ids))

    def _logprobs(self, rows: tuple[TokenRow, ...]) -> JsonObject | None:
        num_top = self._order.num_top_logprobs
        return None if num_top is None else chat_logprobs(rows, num_top, self._detokenizer)


def _message(choice: Choice) -> JsonObject:
    parsed = choice.parsed
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            _call(call, call_id(choice.completion.id, index)) for index, call in enumerate(parsed.tool_calls)
        ]
    return message


def _call(call: ToolCall, id_: str) -> JsonObject:
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def _delta(delta: AnswerDelta, completion_id: str) -> JsonObject:
    body: dict[str, Any] = {}
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.content:
        body["content"] = delta.content
    if delta.call_index is not None:
        body["tool_calls"] = [_call_delta(delta, delta.call_index, completion_id)]
    return body


def _call_delta(delta: AnswerDelta, index: int, completion_id: str) -> JsonObject:
    """The first piece of a call names it; the others add to its arguments."""
    if delta.call_name is None:
        return {"index": index, "function": {"arguments": delta.arguments}}
    return {
        "index": index,
        "id": call_id(completion_id, index),
        "type": "function",
        "function": {"name": delta.call_name, "arguments": delta.arguments},
    }
