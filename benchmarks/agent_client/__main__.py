"""The agent's cost of a chat completion: the stock openai client over httpx's own pool, and over aiohttp's.

    python benchmarks/agent_client [--turns 1200] [--agents 16 64 128]

A server in a process of its own answers after 50 ms. Figures are CPU milliseconds of the client's process per turn,
both in one run.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import statistics
import sys
import time

import httpx
import openai
from aiohttp import web
from httpx_aiohttp import HttpxAiohttpClient

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
TURNS_A_SESSION = 4
ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/agent_client", description="CPU of a chat completion.")
    parser.add_argument("--turns", type=int, default=1200, help="turns a round")
    parser.add_argument("--agents", type=int, nargs="+", default=[16, 64, 128])
    args = parser.parse_args()
    ports: multiprocessing.SimpleQueue[int] = multiprocessing.SimpleQueue()
    server = multiprocessing.Process(target=serve, args=(ports,), daemon=True)
    server.start()
    base_url = f"http://127.0.0.1:{ports.get()}/v1"
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, openai {openai.__version__}"
    )
    print("| agents at once | httpx, ms | aiohttp, ms | ratio |\n|---|---|---|---|")
    for num_agents in args.agents:
        httpx_ms, aiohttp_ms = [], []
        for _ in range(ROUNDS):
            httpx_ms.append(asyncio.run(measure(httpx.AsyncClient, base_url, num_agents, args.turns)))
            aiohttp_ms.append(asyncio.run(measure(HttpxAiohttpClient, base_url, num_agents, args.turns)))
        one, other = statistics.median(httpx_ms), statistics.median(aiohttp_ms)
        print(f"| {num_agents} | {one:.2f} | {other:.2f} | {one / other:.1f} |", flush=True)
    server.terminate()
    return 0


async def measure(client: type[httpx.AsyncClient], base_url: str, num_agents: int, num_turns: int) -> float:
    """Return CPU milliseconds per turn, after one round of warming up."""
    limits = httpx.Limits(max_connections=None)
    async with client(trust_env=False, timeout=None, limits=limits) as http_client:
        first = openai.AsyncOpenAI(api_key="0", base_url=base_url, max_retries=0, http_client=http_client)
        await asyncio.gather(*(session(first) for _ in range(num_agents)))
        started_s, done = time.process_time(), 0
        while done < num_turns:
            await asyncio.gather(*(session(first) for _ in range(num_agents)))
            done += num_agents * TURNS_A_SESSION
        return (time.process_time() - started_s) / done * 1000


async def session(first: openai.AsyncOpenAI) -> None:
    client = first.copy(api_key="1")
    for _ in range(TURNS_A_SESSION):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "What is 3 + 4?"}])


def serve(ports: "multiprocessing.SimpleQueue[int]") -> None:
    asyncio.run(_serve(ports))


async def _serve(ports: "multiprocessing.SimpleQueue[int]") -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ports.put(runner.addresses[0][1])
    await asyncio.Event().wait()


async def answer(request: web.Request) -> web.Response:
    await request.read()
    await asyncio.sleep(0.05)
    return web.json_response(ANSWER)


if __name__ == "__main__":
    sys.exit(main())
