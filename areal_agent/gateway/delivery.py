"""How the answer to an exchange leaves: as one JSON object, or as server-sent events while it is sampled.

::

    session.begin ─▶ outlet ─▶ chunks ─▶ (the turns are in the journal) ─▶ finish reasons, usage, [DONE]

Who hangs up stops the engine; what was sampled until then is recorded. A stream begins with the first token: what fails
before has a status of its own. What fails later becomes the last event, for the status has left already.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import orjson
from aiohttp import web

from areal_agent.gateway.replies import as_request_error, error_object, json_reply
from areal_agent.gateway.session import Session
from areal_agent.gateway.stats import Counters
from areal_agent.gateway.turns.answer import Answer
from areal_agent.gateway.turns.exchange import Exchange
from areal_agent.gateway.turns.outlet import Outlet, Piece
from areal_agent.types import JsonObject

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
DONE = b"data: [DONE]\n\n"


class AnswerBody(Protocol):
    """An answer as JSON, in the manner of its endpoint."""

    def whole(self, answer: Answer) -> JsonObject: ...

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]: ...

    def piece(self, piece: Piece) -> Iterator[JsonObject]: ...

    def last(self, answer: Answer) -> Iterator[JsonObject]: ...


async def deliver(
    http: web.Request, session: Session, exchange: Exchange, body: AnswerBody, counters: Counters
) -> web.StreamResponse:
    """Answer a request, to the last byte; what reaches the agent is marked as delivered."""
    if exchange.order.is_streamed:
        return await _deliver_in_chunks(http, session, exchange, body, counters)
    answer = await _until_hung_up(session.begin(exchange), exchange)
    reply = json_reply(body.whole(answer))
    await reply.prepare(http)
    await reply.write_eof()
    session.deliveries.delivered(answer.completion_ids)
    return reply


async def _deliver_in_chunks(
    http: web.Request, session: Session, exchange: Exchange, body: AnswerBody, counters: Counters
) -> web.StreamResponse:
    outlet = Outlet()
    answering = session.begin(exchange, outlet)
    reply = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        if not await outlet.has_begun():
            await asyncio.shield(answering)
        await reply.prepare(http)
        await reply.write(_events(body.first(exchange.prompt_ids)))
        async for pieces in outlet.batches():
            await reply.write(b"".join(_events(body.piece(piece)) for piece in pieces))
        answer = await asyncio.shield(answering)
        await reply.write(_events(body.last(answer)) + DONE)
        await reply.write_eof()
        session.deliveries.delivered(answer.completion_ids)
    except (asyncio.CancelledError, ConnectionError):
        exchange.hang_up()
        raise
    except Exception as error:  # the boundary: an agent that reads a stream learns of a failure by an event
        if not reply.prepared:
            raise
        fault = as_request_error(error, http)
        counters.errors[fault.status] += 1
        await reply.write(_events([error_object(fault)]))
        await reply.write_eof()
    return reply


async def _until_hung_up(answering: "asyncio.Task[Answer]", exchange: Exchange) -> Answer:
    try:
        return await asyncio.shield(answering)
    except asyncio.CancelledError:
        exchange.hang_up()
        raise


def _events(chunks: Iterable[JsonObject]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
