"""`/v1/responses`, what goes out: `ResponseBody` writes an answer, and `ResponseCalls` handles the calls.

An answer is up to three kinds of items: the reasoning, the message, the calls. A stream tells of each that it begins,
its pieces, and that it is complete; the reasoning and the message as they are sampled, the calls at the end, because
text may follow them and the items have an order.

A response that is stored can be fetched until its session ends. One in the background is sampled while nobody waits;
until it has been fetched, it counts as undelivered.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

from aiohttp import web

from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Answer, Choice, chat_logprobs, response_id
from areal_agent.gateway.bodies import refuse
from areal_agent.gateway.draft import Piece, TokenRow
from areal_agent.gateway.order import Order
from areal_agent.gateway.responses import CUSTOM_INPUT, SEALED, ResponsesRequest, may_be_joined, messages_of
from areal_agent.gateway.server import as_request_error, json_reply
from areal_agent.gateway.session import Session
from areal_agent.gateway.sessions import Traffic
from areal_agent.gateway.turn import Exchange
from areal_agent.tokens.formats.base import ToolCall, call_id
from areal_agent.tokens.renderer import Detokenizer
from areal_agent.types import JsonObject

NOT_SET: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")),
    **{"background": False, "parallel_tool_calls": True, "store": True, "metadata": {}, "top_logprobs": 0},
    **{"reasoning": {}, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": []},
}
"""What a response says of a parameter that its request left out; the others are repeated."""

EVENTS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""The events of the pieces of an item, by its type."""


class ResponseBody:
    """Writes one answer as a `response` object or the events of a stream, and keeps the object for who asks later."""

    names_events = True
    done = b""

    def __init__(
        self,
        request: ResponsesRequest,
        body: JsonObject,
        exchange: Exchange,
        detokenizer: Detokenizer,
        kept: "Kept",
    ) -> None:
        """`body` is the request as it came. It enters itself into `kept`, in the end its object."""
        self._request = request
        self._exchange = exchange
        self._detokenizer = detokenizer
        self._kept = kept
        self._number = exchange.answer_id.partition("_")[2]
        given = {name: value for name in NOT_SET if (value := body.get(name)) is not None}
        self._head = {
            "id": exchange.answer_id,
            "object": "response",
            "created_at": exchange.created_s,
            "model": exchange.model,
            "service_tier": "default",
            "truncation": "disabled",
            **dict.fromkeys(("error", "incomplete_details", "usage")),
            **NOT_SET,
            **given,
        }
        self._answering: asyncio.Task[Answer] | None = None  # in the background
        self._num_events = 0
        self._open: list[JsonObject] = []  # the items that a stream has begun
        self._texts: list[str] = []  # the pieces of the last of them
        self._rows: list[TokenRow] = []  # whose log-probabilities the next piece of the message has

    def now(self) -> JsonObject:
        """Return the response as far as it has come."""
        return self._object("cancelled" if self._exchange.is_hung_up else "in_progress")

    def begin(self, session: Session, http: web.Request) -> "asyncio.Task[Answer]":
        """Sample in the background."""

        def end(answering: "asyncio.Task[Answer]") -> None:
            error = answering.exception()
            if error is None:
                self.whole(answering.result())
            else:
                self.fault(as_request_error(cast("Exception", error), http))

        self._keep(self)
        self._answering = session.begin(self._exchange)
        self._answering.add_done_callback(end)
        return self._answering

    async def cancel(self) -> None:
        """Stop sampling. In the background, wait until what has been sampled is recorded."""
        self._exchange.hang_up()
        if self._answering is not None:
            await asyncio.wait([self._answering])

    def _keep(self, response: "ResponseBody | JsonObject") -> None:
        self._kept[self._exchange.answer_id] = response

    # ------------------------------------------------------------------------------------------ at once

    def whole(self, answer: Answer) -> JsonObject:
        [choice] = answer.choices
        is_cut = choice.finish_reason == "length"
        response = self._object(
            "incomplete" if is_cut else "completed",
            output=self._items(choice),
            usage=_usage(answer),
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )
        if self._request.has_token_ids:
            response["prompt_token_ids"] = list(answer.turns[0].prompt_ids)
            response["token_ids"] = choice.completion.token_ids
        self._keep(response)
        return response

    def fault(self, fault: RequestError) -> JsonObject:
        """Return the event of a failure; from now on, the response has failed."""
        if self._exchange.is_hung_up:
            response = self.now()
        else:
            code = "rate_limit_exceeded" if fault.status == 429 else "server_error"
            response = self._object("failed", error={"code": code, "message": fault.message})
        self._keep(response)
        return self._event("response.failed", response=response)

    def _object(self, status: str, **fields: Any) -> dict[str, Any]:
        return {**self._head, "status": status, "output": [], **fields}

    def _items(self, choice: Choice) -> list[JsonObject]:
        parsed = choice.parsed
        items: list[JsonObject] = []
        if parsed.reasoning:
            items.append(self._reasoning(parsed.reasoning))
        if parsed.content or not parsed.tool_calls:
            status = "incomplete" if choice.finish_reason == "length" else "completed"
            items.append(self._message(parsed.content, status, _rows_of_content(choice)))
        items += [self._call(call, choice.completion.id, index) for index, call in enumerate(parsed.tool_calls)]
        return items

    def _reasoning(self, text: str) -> JsonObject:
        part = {"type": "reasoning_text", "text": text}
        item: dict[str, Any] = {"id": f"rs_{self._number}", "type": "reasoning", "summary": [], "content": [part]}
        if "reasoning.encrypted_content" in self._request.include:
            item["encrypted_content"] = SEALED + text
        return item

    def _message(self, text: str, status: str, rows: Sequence[TokenRow]) -> JsonObject:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(rows)}
        fixed = {"id": f"msg_{self._number}", "type": "message", "role": "assistant"}
        return {**fixed, "status": status, "content": [part]}

    def _call(self, call: ToolCall, completion_id: str, index: int) -> JsonObject:
        tools = self._request.tools
        namespace = tools.namespaces.get(call.name, "")
        item: dict[str, Any] = {
            "call_id": call_id(completion_id, index),
            "name": call.name.removeprefix(f"{namespace}."),
            "status": "completed",
        }
        if namespace:
            item["namespace"] = namespace
        text = call.arguments.get(CUSTOM_INPUT) if call.name in tools.custom else None
        if isinstance(text, str):  # else the call is of a function of that name
            return {"id": f"ctc_{self._number}_{index}", "type": "custom_tool_call", "input": text, **item}
        arguments = call.arguments_json
        return {"id": f"fc_{self._number}_{index}", "type": "function_call", "arguments": arguments, **item}

    def _logprobs(self, rows: Sequence[TokenRow]) -> list[Any]:
        num_top = self._request.num_top_logprobs
        return [] if num_top is None else chat_logprobs(rows, num_top, self._detokenizer)["content"]

    # -------------------------------------------------------------------------------------- as a stream

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]:
        self._keep(self)
        yield self._event("response.created", response=self.now())
        yield self.idle()

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        self._rows += piece.gain.rows
        for delta in piece.gain.deltas:
            if delta.reasoning:
                if not self._open:
                    yield from self._added(self._reasoning(""))
                yield self._grown(delta.reasoning)
            if delta.content:
                if not self._open or self._open[-1]["type"] == "reasoning":
                    if self._open:
                        yield from self._done(0, self._reasoning("".join(self._texts)))
                    yield from self._added(self._message("", "in_progress", ()))
                yield self._grown(delta.content)

    def idle(self) -> JsonObject:
        return self._event("response.in_progress", response=self.now())

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """Yield the end of the last item, the items that did not stream, and the whole response."""
        final = self.whole(answer)
        for index, item in enumerate(final["output"]):
            if index >= len(self._open):
                yield from self._added(item)
                if text := _text(item):
                    yield self._delta(index, item, text)
            if index >= len(self._open) - 1:
                yield from self._done(index, item)
        yield self._event(f"response.{final['status']}", response=final)

    def _grown(self, text: str) -> JsonObject:
        """Return the event of a piece of the open item's text."""
        self._texts.append(text)
        return self._delta(len(self._open) - 1, self._open[-1], text)

    def _added(self, item: JsonObject) -> Iterator[JsonObject]:
        self._open.append(item)
        self._texts.clear()
        index = len(self._open) - 1
        yield self._event("response.output_item.added", output_index=index, item=_begun(item))
        if "content" in item:
            part = item["content"][0] | {"text": ""} | ({"logprobs": []} if item["type"] == "message" else {})
            yield self._event("response.content_part.added", **_place(index, item), part=part)

    def _delta(self, index: int, item: JsonObject, text: str) -> JsonObject:
        fields: dict[str, Any] = {}
        if item["type"] == "message":
            fields["logprobs"] = self._logprobs(self._rows)
        self._rows = []
        return self._event(f"response.{EVENTS[item['type']]}.delta", **_place(index, item), delta=text, **fields)

    def _done(self, index: int, item: JsonObject) -> Iterator[JsonObject]:
        if "content" in item:
            part = item["content"][0]
            fields = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
        else:
            fields = {name: item[name] for name in ("name", "arguments", "input") if name in item}
        yield self._event(f"response.{EVENTS[item['type']]}.done", **_place(index, item), **fields)
        if "content" in item:
            yield self._event("response.content_part.done", **_place(index, item), part=item["content"][0])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _place(index: int, item: JsonObject) -> dict[str, Any]:
    place = {"item_id": item["id"], "output_index": index}
    return place | {"content_index": 0} if "content" in item else place


def _text(item: JsonObject) -> str:
    """Return the text of an item that a stream sends in pieces."""
    return item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))


def _begun(item: JsonObject) -> JsonObject:
    """Return an item as it is before its first piece."""
    empty = {"content": [], "arguments": "", "input": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items() if name != "encrypted_content"}


def _rows_of_content(choice: Choice) -> tuple[TokenRow, ...]:
    """Return the tokens of the content, which follows the reasoning; if calls interrupt it, all that follow."""
    reasoning = choice.parsed.reasoning or ""
    begin = max(0, choice.text.find(reasoning)) + len(reasoning)
    found = choice.text.find(choice.parsed.content, begin)
    begin, end = (begin, len(choice.text)) if found < 0 else (found, found + len(choice.parsed.content))
    return tuple(row for row in choice.rows if begin <= row.start < end)


def _usage(answer: Answer) -> JsonObject:
    usage = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }


Kept = dict[str, ResponseBody | JsonObject]
"""The responses of a session by id: in flight, or complete."""


class ResponseCalls:
    """The handlers of `/v1/responses`. A session keeps its responses (`Session.responses`) until it ends."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        place: Callable[[web.Request, Session, Order], Awaitable[Exchange]],
        answer: Callable[
            [web.Request, Session, Order, Callable[[Exchange], ResponseBody]], Awaitable[web.StreamResponse]
        ],
        traffic: Traffic,
    ) -> None:
        self._detokenizer = detokenizer
        self._place = place
        self._answer = answer
        self._traffic = traffic

    async def create(self, http: web.Request, session: Session, body: JsonObject) -> web.StreamResponse:
        request = ResponsesRequest.read(body)
        order = request.order_of(self._messages(session, request))

        def body_of(exchange: Exchange) -> ResponseBody:
            kept = session.responses if request.store else {}
            return ResponseBody(request, body, exchange, self._detokenizer, kept)

        if not request.background:
            return await self._answer(http, session, order, body_of)
        with ExitStack() as counted:
            counted.enter_context(self._traffic.call(session.record.id))  # as one that is waited for
            response = body_of(await self._place(http, session, order))
            until_its_end = counted.pop_all()
            response.begin(session, http).add_done_callback(lambda _: until_its_end.close())
        return json_reply(response.now())

    async def retrieve(self, http: web.Request, session: Session) -> web.StreamResponse:
        """Send a response as far as it has come. A complete one counts as delivered then."""
        if http.query.get("stream", "false") != "false":
            refuse("stream", http.query["stream"], "left out: a kept response is sent whole")
        response = self._find(session, http.match_info["response_id"])
        with session.deliveries.one():
            reply = json_reply(_now(response))
            await reply.prepare(http)
            await reply.write_eof()
            if not isinstance(response, ResponseBody):
                session.deliveries.delivered([response["id"]])
        return reply

    async def cancel(self, http: web.Request, session: Session) -> web.StreamResponse:
        """Stop a response; what has been sampled is recorded as aborted."""
        response_id = http.match_info["response_id"]
        response = self._find(session, response_id)
        if isinstance(response, ResponseBody):
            await response.cancel()
        elif response["status"] != "cancelled":
            raise _wrong_state(response, "only one in progress can be cancelled")
        return json_reply(_now(self._find(session, response_id)))

    # ------------------------------------------------------------------------------------------- internals

    def _messages(self, session: Session, request: ResponsesRequest) -> list[JsonObject]:
        """Return the whole conversation that a request asks to continue."""
        messages: list[JsonObject] = []
        if request.instructions is not None:
            messages.append({"role": "system", "content": request.instructions})
        if (previous_id := request.previous_response_id) is not None:
            previous = _now(self._find(session, previous_id, "previous_response_id"))
            has_instructions = previous["instructions"] is not None
            messages += session.conversation_after(previous_id, "previous_response_id")[has_instructions:]
        text = request.input
        items = [{"role": "user", "content": text}] if isinstance(text, str) else text
        translate = partial(messages_of, find=partial(self._item, session))
        may_keep = not items or not may_be_joined(items[-1])
        return messages + session.translated.messages(items, translate, may_keep=may_keep)

    def _item(self, session: Session, item_id: str, param: str) -> JsonObject:
        """Return an item of a kept response."""
        for item in _now(self._find(session, response_id(item_id), param, item_id))["output"]:
            if item["id"] == item_id:
                return item
        raise _not_found(item_id, param)

    def _find(
        self, session: Session, response_id: str, param: str = "response_id", shown: str | None = None
    ) -> "ResponseBody | JsonObject":
        response = session.responses.get(response_id)
        if response is None:
            raise _not_found(shown or response_id, param)
        return response


def _now(response: ResponseBody | JsonObject) -> JsonObject:
    return response.now() if isinstance(response, ResponseBody) else response


def _not_found(name: str, param: str) -> RequestError:
    return RequestError(
        f"{param} is {name!r:.200}: this session has no such response, or it was not stored (store: false); send the "
        "items themselves, or the id of a stored one",
        status=404,
        param=param,
        code="not_found",
    )


def _wrong_state(response: JsonObject, remedy: str) -> RequestError:
    return RequestError(
        f"the response {response['id']!r} is {response['status']}; {remedy}",
        param="response_id",
        code="wrong_state",
    )
