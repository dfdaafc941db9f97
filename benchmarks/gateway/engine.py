"""A stub of an inference engine on SGLang's wire: the same prepared answers, after a delay that may be zero.

    python benchmarks/gateway/engine.py --answers FILE --delay-s 0

Prints its port. It does as little as possible, so that one core can feed a gateway on another.
"""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

import orjson
from aiohttp import web


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--delay-s", type=float, default=0.0)
    args = parser.parse_args()
    asyncio.run(serve([reply_of(ids) for ids in json.loads(args.answers.read_text())], args.delay_s))


def reply_of(ids: list[int]) -> bytes:
    """Return the answer of `/generate`; nobody reads its id."""
    meta = {
        "id": "stub",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": 1,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_versions": [{"version": "0:0", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-0.5 - index / 100, token_id, None] for index, token_id in enumerate(ids)],
    }
    return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})


async def serve(replies: list[bytes], delay_s: float) -> None:
    turn = itertools.cycle(replies)

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        if delay_s:
            await asyncio.sleep(delay_s)
        return web.Response(body=next(turn), content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "stub",
                "weight_version": "0:0",
                "vocab_size": 8256,
                "max_context_tokens": 1_000_000,
                "num_running_reqs": 0,
                "num_queue_reqs": 0,
                "busy_s": 0.0,
                "generated_tokens": 0,
            }
        )

    async def ok(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", ok)
    app.router.add_get("/server_info", info)
    app.router.add_get("/health", ok)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
