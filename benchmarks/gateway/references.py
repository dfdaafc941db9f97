"""Two gateways to compare with: one that only passes on, and one that tokenises the whole conversation every turn.

    python benchmarks/gateway/references.py pass_through|retokenise --engine URL --tokenizer DIR

Neither records anything: they have no ledger, no sessions, no tool calls. Prints its port.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from transformers import AutoTokenizer

Prompt = Callable[[dict[str, Any]], bytes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["pass_through", "retokenise"])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--tokenizer", required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def retokenise(body: dict[str, Any]) -> bytes:
        for message in body["messages"]:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])
        ids = tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False
        )
        return orjson.dumps({"input_ids": ids})

    def pass_through(body: dict[str, Any]) -> bytes:
        return orjson.dumps(body)

    async def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids)

    async def no_text(ids: list[int]) -> str:
        return "an answer of about the same length as the others give, so that the histories are alike " * 3

    prompt, text = (retokenise, text_of) if args.kind == "retokenise" else (pass_through, no_text)
    asyncio.run(serve(args.engine, prompt, text))


async def serve(engine: str, prompt: Prompt, text: Callable[[list[int]], Awaitable[str]]) -> None:
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)

    async def chat(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        async with http.post(f"{engine}/generate", data=prompt(body)) as response:
            answer = orjson.loads(await response.read())
        message = {"role": "assistant", "content": await text(answer["output_ids"])}
        reply = {"id": "c", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    async def session(request: web.Request) -> web.Response:
        return web.json_response({"session_id": "s", "api_key": "k"})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", chat)
    for path in ("/rl/start_session", "/rl/set_reward", "/rl/end_session"):
        app.router.add_post(path, session)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
