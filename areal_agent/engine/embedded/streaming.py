"""A streamed answer on its way to the client: events as tokens come, at the pace at which the client reads.

The answer begins with the first token, so that a request which is refused before that is answered with its own status.
Whatever ends it later is an event. It knows nothing of the model thread; a client that is gone is its caller's matter.
"""

import asyncio

from aiohttp import web

from areal_agent.engine import wire
from areal_agent.engine.embedded.token_stream import TokenStream
from areal_agent.engine_types import GenerateRequest, GenerateResult
from areal_agent.errors import EngineError, EngineRejected

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


async def stream_answer(
    http: web.Request, request: GenerateRequest, tokens: TokenStream, answer: asyncio.Future[GenerateResult]
) -> web.StreamResponse:
    """Send what `tokens` has until `answer` is done. Raises ConnectionError when the client is gone."""
    response = web.StreamResponse(headers=HEADERS)
    num_sent = 0
    while True:
        chunk = await tokens.take()
        if answer.done():
            break  # the last event has all that was not sent
        if not chunk.token_ids:
            continue
        if not response.prepared:
            await response.prepare(http)
        num_sent += len(chunk.token_ids)
        await response.write(wire.encode_event(wire.encode_chunk(request.request_id, chunk, num_tokens=num_sent)))
    if not response.prepared:
        answer.result()  # a failure is answered in one piece
        await response.prepare(http)
    await response.write(_last_event(request, answer, num_sent) + wire.STREAM_END)
    await response.write_eof()
    return response


def _last_event(request: GenerateRequest, answer: asyncio.Future[GenerateResult], num_sent: int) -> bytes:
    try:
        return wire.encode_event(wire.encode_result(request, answer.result(), num_sent=num_sent))
    except EngineError as error:
        status = 400 if isinstance(error, EngineRejected) else 503
        return wire.encode_event(wire.encode_failure(wire.Failure(message=str(error), status=status)))
