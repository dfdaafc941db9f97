"""Agents without any code for training: every program that speaks HTTP and OpenAI's API can be one.

    python examples/online_rl/agent.py --gateway http://127.0.0.1:8000 --key-file runs/gateway/admin_key

The agents play groups of siblings, endlessly: start a session, let the model solve a question of the calculator with
its Python tool, report the reward, end the session. Each group prints a line. At the staleness bound the gateway
answers 429, and while it restarts it does not answer: either way the agents ask again. A rollout that fails is ended as
an error, and its siblings go on. Ctrl-C ends open sessions: one that is left open holds room under the bound until the
gateway's timeout.
"""

import argparse
import asyncio
import secrets
import signal
import sys
from collections.abc import Iterable
from contextlib import aclosing, suppress
from http import HTTPStatus
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from openai import AsyncOpenAI

import sandboxes
from envs.calculator.reward import score
from envs.calculator.tasks import load
from envs.calculator.workflow import MAX_TURNS, TOOLS, run_tool

RETRY_S = 0.5
LEAVE_S = 10.0
"""The time limit of ending a session that failed."""
TIMEOUT = httpx.Timeout(600.0, connect=60.0)
INTERRUPTED_CODE = 130


class Refused(Exception):
    """The gateway will never start such a session; its message says why."""


class Agents:
    """Plays groups of siblings, several at once. All of them share one pool of connections."""

    def __init__(self, gateway: str, key: str, pool: sandboxes.Pool, group_size: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=gateway, timeout=TIMEOUT, limits=limits, trust_env=False)
        self._openai = AsyncOpenAI(api_key="each session has its own", max_retries=0, http_client=self._http)
        self._admin_key = key
        self._pool = pool
        self._group_size = group_size
        self._name = f"agents-{secrets.token_hex(4)}"  # this process cannot continue the groups of an earlier one
        self._is_gateway_gone = False

    async def aclose(self) -> None:
        await self._http.aclose()

    async def play_forever(self, tasks: list[dict[str, Any]], numbers: Iterable[int]) -> None:
        """Play one group after the other, however each ends. Raises Refused, alone or in an ExceptionGroup."""
        for number in numbers:
            task, group_id = tasks[number % len(tasks)], f"{self._name}-{number}"
            async with asyncio.TaskGroup() as group:
                siblings = [group.create_task(self._play(task, group_id)) for _ in range(self._group_size)]
            rewards = [one for sibling in siblings if (one := sibling.result()) is not None]
            mean = f", mean reward {fmean(rewards):.2f}" if rewards else ""
            _tell(f"{group_id}: {len(rewards)} of {self._group_size} rollouts are done{mean}")

    async def _play(self, task: dict[str, Any], group_id: str) -> float | None:
        """Return the reward of one rollout, or None when it failed. A failure ends only this rollout."""
        session = await self._start(task, group_id)
        if session is None:
            return None
        try:
            reward = await self._solve(task, session)
            await self._say(session, "/rl/set_reward", reward=reward)
            await self._say(session, "/rl/end_session")
            return reward
        except asyncio.CancelledError:
            await self._leave(session, status="cancelled")
            raise
        except Exception as error:  # whatever an agent does wrong is printed and recorded
            cause = f"{type(error).__name__}: {error}"
            _tell(f"{session['session_id']} of {group_id} is given up: {cause}")
            await self._leave(session, status="error", error=cause)
            await asyncio.sleep(RETRY_S)  # a lasting cause must not make failures by the thousand
            return None

    async def _start(self, task: dict[str, Any], group_id: str) -> dict[str, Any] | None:
        """Start a session once the gateway is there and the bound has room; None when the group is full."""
        body = {"task_id": str(task["id"]), "group_id": group_id, "group_size": self._group_size}
        body |= {"sampling": {"temperature": 1.0, "max_tokens": 64}}
        while True:
            try:
                answer = await self._ask_to_start(body)
            except httpx.TransportError as error:
                self._tell_that_it_is_gone(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._is_gateway_gone = False
            if answer.is_success:
                return answer.json()
            if answer.status_code == HTTPStatus.CONFLICT:
                _tell(_message(answer))
                return None
            if not (answer.is_server_error or answer.status_code == HTTPStatus.TOO_MANY_REQUESTS):
                raise Refused(_message(answer))
            await asyncio.sleep(float(answer.headers.get("Retry-After", RETRY_S)))

    async def _ask_to_start(self, body: dict[str, Any]) -> httpx.Response:
        """Ask for a session. When cancelled, wait for the answer: only it has the key that can end the session."""
        headers = {"Authorization": f"Bearer {self._admin_key}"}
        asked = asyncio.ensure_future(self._http.post("/rl/start_session", headers=headers, json=body))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            with suppress(httpx.TransportError, TimeoutError):
                answer = await asyncio.wait_for(asked, LEAVE_S)
                if answer.is_success:
                    await self._leave(answer.json(), status="cancelled")
            raise

    async def _solve(self, task: dict[str, Any], session: dict[str, Any]) -> float:
        messages: list[Any] = list(task["messages"])
        outputs: list[str] = []
        client = self._openai.copy(base_url=session["base_url"], api_key=session["api_key"])
        async with self._pool.acquire() as sandbox:
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

    async def _leave(self, session: dict[str, Any], **how: str) -> None:
        """End a session early if possible: the gateway may be gone, or have ended it."""
        with suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._say(session, "/rl/end_session", **how)

    async def _say(self, session: dict[str, Any], path: str, **body: Any) -> None:
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        (await self._http.post(path, headers=headers, json=body)).raise_for_status()

    def _tell_that_it_is_gone(self, error: Exception) -> None:
        """Print it once for all agents."""
        if not self._is_gateway_gone:
            _tell(
                f"no gateway answers at {self._http.base_url}: {type(error).__name__}: {error}; asking until one does"
            )
        self._is_gateway_gone = True


def _message(answer: httpx.Response) -> str:
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):  # something else answers there
        return f"{answer.status_code} {answer.text[:200]}"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def main(options: argparse.Namespace) -> None:
    """Play until cancelled. Raises what `Agents.play_forever` raises."""
    playing = asyncio.current_task()
    assert playing is not None  # asyncio.run made one
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    tasks, numbers, key = load("train", 0), count(), options.key_file.read_text().strip()
    async with (
        sandboxes.open_pool(backend="embedded", wall_s=5.0, max_concurrent=16) as pool,
        aclosing(Agents(options.gateway, key, pool, options.group_size)) as agents,
        asyncio.TaskGroup() as players,
    ):
        for _ in range(options.groups):
            players.create_task(agents.play_forever(tasks, numbers))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Agents for a gateway that stands alone.")
    parser.add_argument("--gateway", required=True, metavar="URL")
    parser.add_argument("--key-file", required=True, type=Path, help="the file with the gateway's admin key")
    parser.add_argument("--group-size", type=int, default=8, help="siblings a question, as in the trainer's config")
    parser.add_argument("--groups", type=int, default=8, help="questions at once")
    return parser.parse_args()


def run() -> str | int:
    """Play and return the exit code of the process."""
    outcome: str | int = 0
    try:
        asyncio.run(main(parse()))
    except* Refused as refusals:
        outcome = str(_one_of(refusals))
    except* asyncio.CancelledError:
        outcome = INTERRUPTED_CODE
    return outcome


def _one_of(error: BaseException) -> BaseException:
    return _one_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(run())
