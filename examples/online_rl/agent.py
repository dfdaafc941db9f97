"""Agents that know nothing of training: any program that can speak HTTP and OpenAI's API will do.

    python examples/online_rl/agent.py --gateway http://127.0.0.1:8000 --key-file runs/gateway/admin_key

Endlessly, a group of siblings at a time: start a session, let the model solve a question of the calculator with its
Python tool, say what it earned, end. At the staleness bound the gateway answers 429, and while it is restarted it does
not answer: either way the agents ask again.
"""

import argparse
import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

import sandboxes
from envs.calculator.reward import score
from envs.calculator.tasks import load
from envs.calculator.workflow import MAX_TURNS, TOOLS, run_tool

RETRY_S = 0.5


class Agents:
    """Plays groups of siblings, several at once."""

    def __init__(self, gateway: str, key: str, pool: sandboxes.Pool, group_size: int) -> None:
        self._http = httpx.AsyncClient(base_url=gateway, timeout=None, trust_env=False)
        self._headers = {"Authorization": f"Bearer {key}"}
        self._pool = pool
        self._group_size = group_size

    async def play_forever(self, tasks: list[dict[str, Any]], numbers: "count[int]") -> None:
        """One group after the other."""
        for number in numbers:
            task = tasks[number % len(tasks)]
            group_id = f"task-{number}"
            await asyncio.gather(*(self._play(task, group_id) for _ in range(self._group_size)))

    async def _play(self, task: dict[str, Any], group_id: str) -> None:
        """One rollout. When the gateway dies in the middle of it, another one takes its place."""
        while True:
            session = await self._start(task, group_id)
            try:
                reward = await self._solve(task, session)
                await self._say(session, "/rl/set_reward", reward=reward)
                await self._say(session, "/rl/end_session")
                return
            except (OpenAIError, httpx.HTTPError):
                await asyncio.sleep(RETRY_S)

    async def _start(self, task: dict[str, Any], group_id: str) -> dict[str, Any]:
        body = {"task_id": str(task["id"]), "group_id": group_id, "group_size": self._group_size}
        body |= {"sampling": {"temperature": 1.0, "max_tokens": 64}}
        while True:
            try:
                answer = await self._http.post("/rl/start_session", headers=self._headers, json=body)
            except httpx.HTTPError:  # the gateway is being restarted
                await asyncio.sleep(RETRY_S)
                continue
            if answer.status_code not in (429, 503):  # the staleness bound; a gateway that is closing
                return answer.raise_for_status().json()
            await asyncio.sleep(float(answer.headers["Retry-After"]))

    async def _solve(self, task: dict[str, Any], session: dict[str, Any]) -> float:
        messages: list[Any] = list(task["messages"])
        outputs: list[str] = []
        async with (
            AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client,
            self._pool.acquire() as sandbox,
        ):
            for _ in range(MAX_TURNS):
                reply = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS)
                message = reply.choices[0].message
                if not message.tool_calls:
                    return score(message.content or "", outputs, task["answer"])
                messages.append(message.to_dict())
                for call in message.tool_calls:
                    outputs.append(await run_tool(sandbox, call))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": outputs[-1]})
        return 0.0

    async def _say(self, session: dict[str, Any], path: str, **body: Any) -> None:
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        (await self._http.post(path, headers=headers, json=body)).raise_for_status()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Agents for a gateway that stands alone.")
    parser.add_argument("--gateway", required=True, metavar="URL")
    parser.add_argument("--key-file", required=True, type=Path, help="the file with the gateway's admin key")
    parser.add_argument("--group-size", type=int, default=8, help="siblings a question, as in the trainer's config")
    parser.add_argument("--groups", type=int, default=8, help="questions at once")
    options = parser.parse_args()
    tasks, numbers = load("train", 0), count()
    async with sandboxes.open_pool(backend="subprocess", wall_s=5.0, max_concurrent=16) as pool:
        agents = Agents(options.gateway, options.key_file.read_text().strip(), pool, options.group_size)
        await asyncio.gather(*(agents.play_forever(tasks, numbers) for _ in range(options.groups)))


if __name__ == "__main__":
    asyncio.run(main())
