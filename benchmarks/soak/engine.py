"""The scripted engine as a server, on an address that several such servers share.

    python benchmarks/soak/engine.py --answers FILE --port PORT --version 1:0

The kernel gives each new connection to one of those that listen on PORT. Each is told of new weights on a port of its
own, which it prints. An answer takes `ANSWER_S`, and a push may fall in the middle of it.
"""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

from aiohttp import web

from areal_agent.engine.fake import FakeEngine
from areal_agent.engine.wire import control, generate
from areal_agent.errors import EngineRejected
from areal_agent.types import DiskWeights, TokenChunk, WeightVersion

STEP_S, TOKENS_A_STEP = 0.05, 16
ANSWER_S = 4 * STEP_S  # 64 tokens
VOCAB_SIZE, MAX_CONTEXT_TOKENS = 8256, 32_768


async def serve(answers: list[list[int]], version: WeightVersion, port: int) -> None:
    replies = itertools.cycle(answers)
    engine = FakeEngine(
        lambda _: next(replies),
        version=version,
        vocab_size=VOCAB_SIZE,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        is_stepped=True,
    )

    async def answer(http: web.Request) -> web.StreamResponse:
        call = generate.GenerateCall.read(await http.read())
        request, chunks, num_sent = call.request(), asyncio.Queue[TokenChunk | None](), 0
        try:
            generate.check_request(request, engine.info())
        except EngineRejected as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        result = asyncio.ensure_future(engine.generate(request, chunks.put_nowait))
        if not call.stream:
            return web.json_response(generate.encode_result(request, await result))
        result.add_done_callback(lambda _: chunks.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        while chunk := await chunks.get():
            num_sent += len(chunk.token_ids)
            event = generate.encode_chunk(request.request_id, chunk, num_tokens=num_sent)
            await response.write(generate.encode_event(event))
        last = generate.encode_result(request, result.result(), num_sent=num_sent)
        await response.write(generate.encode_event(last) + generate.STREAM_END)
        return response

    async def abort(http: web.Request) -> web.Response:
        await engine.abort(control.Abort.read(await http.read()).rid or "")
        return web.json_response({})

    async def update(http: web.Request) -> web.Response:
        told = control.DiskUpdate.read(await http.read())
        await engine.update_weights(DiskWeights(path=told.model_path), told.weight_version)
        return web.json_response({})

    async def info(_: web.Request) -> web.Response:
        stats = control.EngineStats(
            num_running=engine.num_in_flight, num_queued=0, busy_s=0, generated_tokens=0, weight_version=engine.version
        )
        return web.json_response(control.encode_info(engine.info(), stats))

    app = web.Application(client_max_size=2**26)
    for path, handler in {
        generate.GENERATE: answer,
        control.ABORT_REQUEST: abort,
        control.UPDATE_FROM_DISK: update,
    }.items():
        app.router.add_post(path, handler)
    for path in (control.SERVER_INFO, control.HEALTH):
        app.router.add_get(path, info)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096, reuse_port=True).start()
    print(runner.addresses[0][1], flush=True)
    while True:
        await asyncio.sleep(STEP_S)
        engine.step(TOKENS_A_STEP)
        for seen in (engine.requests, engine.aborted_ids, engine.weights):  # kept for tests
            seen.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--version", type=WeightVersion.parse, required=True)
    args = parser.parse_args()
    asyncio.run(serve(json.loads(args.answers.read_text()), args.version, args.port))
