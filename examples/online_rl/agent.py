"""Agents without any code for training: this file needs `openai` alone. Put your own agent into `solve`.

    python examples/online_rl/agent.py --gateway http://127.0.0.1:8000 --key-file runs/gateway/admin_key

The agents play groups of siblings, endlessly: start a session, let the model solve a sum with its tool, report the
reward, end the session. Each group prints a line. At the staleness bound the gateway answers 429, and while it restarts
it does not answer: either way the agents ask again. A rollout that fails is ended as an error, and its siblings go on.
Ctrl-C ends open sessions: one that is left open holds room under the bound until the gateway's timeout.
"""

import argparse
import ast
import asyncio
import json
import operator
import random
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

RETRY_S = 0.5
LEAVE_S = 10.0
"""The time limit of ending a session that failed."""
TIMEOUT = Timeout(600.0, connect=60.0)
INTERRUPTED_CODE = 130
START_ONE = "start one with python -m areal_agent.gateway --engine URL --tokenizer PATH --port 8000"

# ------------------------------------------------------------------------------------------ the agent and its tasks

MAX_TURNS = 4  # a program, a repair or two, and the answer
HEADS = ("What is {}?", "Compute {}.", "Work out {}.")
FORMS = ("{} * {} + {}", "{} * {} - {}", "{} + {} * {}", "{} - {} * {}", "({} + {}) * {}", "({} - {}) * {}")
WORDS = {"+": "plus", "-": "minus", "*": "times"}
NUM_DIGITS = 5  # of a result: hard to compute in the head, and soon copied by a small model
NUMBER = re.compile(r"(?<!\d)-?\d+")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program; what it prints comes back.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
USAGE = 'Error: call python with {"code": "print(...)"}, a sum of whole numbers'
APPLY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def task(number: int) -> tuple[str, str]:
    """Return a question and its answer, the same for the same number."""
    rng = random.Random(number)
    text = result = ""
    while len(result.removeprefix("-")) != NUM_DIGITS:
        numbers = (rng.randint(100, 999), rng.randint(10, 99), rng.randint(100, 999))
        text = rng.choice(FORMS).format(*numbers)
        result = run_program(f"print({text})")
    if rng.random() < 0.5:
        text = "".join(WORDS.get(sign, sign) for sign in text)
    return rng.choice(HEADS).format(text), result


async def solve(client: AsyncOpenAI, question: str, answer: str) -> float:
    """Return 1.0 when the model says the answer and its program printed it, else 0.0."""
    messages: list[Any] = [{"role": "user", "content": question}]
    outputs: list[str] = []
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            said = NUMBER.findall(message.content or "")
            return float(answer in outputs and said[-1:] == [answer])
        messages.append(message.to_dict())
        for call in message.tool_calls:
            outputs.append(run_tool(call.function.arguments if call.type == "function" else ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": outputs[-1]})
    return 0.0


def run_tool(arguments: str) -> str:
    """Return what the model reads: what its program prints, or its error."""
    try:
        return run_program(json.loads(arguments)["code"])
    except SyntaxError as error:
        return f"SyntaxError: {error.msg}"
    except (ValueError, KeyError, TypeError):
        return USAGE


def run_program(code: str) -> str:
    """Return what `print(EXPRESSION)` prints; no other program is run, so nothing needs a sandbox. Raises ValueError.

    >>> run_program("print((348 + 27) * 191)")
    '71625'
    """
    match ast.parse(code).body:
        case [ast.Expr(ast.Call(ast.Name("print"), [expression], []))]:
            return str(_value(expression))
        case _:
            raise ValueError(code)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(int() as number):
            return number
        case ast.BinOp(left, sign, right) if type(sign) in APPLY:
            return APPLY[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError(ast.dump(node))


# --------------------------------------------------------------------------------- the gateway, for any agent


class Refused(Exception):
    """The gateway will never start such a session; its message says why."""


class Agents:
    """Plays groups of siblings, several at once. All of them share one pool of connections."""

    def __init__(self, gateway: str, key: str, group_size: int) -> None:
        self._gateway = gateway
        http = DefaultAsyncHttpxClient(trust_env=False)
        self._admin = AsyncOpenAI(base_url=gateway, api_key=key, max_retries=0, timeout=TIMEOUT, http_client=http)
        self._group_size = group_size
        self._name = f"agents-{secrets.token_hex(4)}"  # this process cannot continue the groups of an earlier one
        self._is_gateway_gone = False

    async def aclose(self) -> None:
        await self._admin.close()

    async def play_forever(self, numbers: Iterable[int]) -> None:
        """Play one group after the other, however each ends. Raises Refused, alone or in an ExceptionGroup."""
        for number in numbers:
            group_id = f"{self._name}-{number}"
            async with asyncio.TaskGroup() as group:
                siblings = [group.create_task(self._play(number, group_id)) for _ in range(self._group_size)]
            rewards = [one for sibling in siblings if (one := sibling.result()) is not None]
            mean = f", mean reward {fmean(rewards):.2f}" if rewards else ""
            _tell(f"{group_id}: {len(rewards)} of {self._group_size} rollouts are done{mean}")

    async def _play(self, number: int, group_id: str) -> float | None:
        """Return the reward of one rollout, or None when it failed. A failure ends only this rollout."""
        session = await self._start(number, group_id)
        if session is None:
            return None
        try:
            reward = await self._solve(number, session)
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

    async def _solve(self, number: int, session: dict[str, Any]) -> float:
        client = self._admin.copy(base_url=session["base_url"], api_key=session["api_key"])
        return await solve(client, *task(number))

    async def _start(self, number: int, group_id: str) -> dict[str, Any] | None:
        """Start a session once the gateway is there and the bound has room; None when the group is full."""
        body = {"task_id": f"sum-{number}", "group_id": group_id, "group_size": self._group_size}
        body |= {"sampling": {"temperature": 1.0, "max_tokens": 64}}
        while True:
            try:
                session = await self._ask_to_start(body)
            except APIConnectionError as error:
                self._tell_that_it_is_gone(error)
                await asyncio.sleep(RETRY_S)
                continue
            except APIStatusError as error:
                if error.status_code == HTTPStatus.CONFLICT:
                    _tell(_message(error))
                    return None
                if error.status_code < 500 and error.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                    raise Refused(_message(error)) from error
                await asyncio.sleep(float(error.response.headers.get("Retry-After", RETRY_S)))
                continue
            if not isinstance(session, dict):
                raise Refused(f"what answers at {self._gateway} is no gateway: name one with --gateway, or {START_ONE}")
            self._is_gateway_gone = False
            return session

    async def _ask_to_start(self, body: dict[str, Any]) -> Any:
        """Ask for a session. When cancelled, wait for the answer: only it has the key that can end the session."""
        asked = asyncio.ensure_future(self._admin.post("/rl/start_session", cast_to=object, body=body))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            with suppress(APIError, TimeoutError):
                session: Any = await asyncio.wait_for(asked, LEAVE_S)
                await self._leave(session, status="cancelled")
            raise

    async def _leave(self, session: dict[str, Any], **how: str) -> None:
        """End a session early if possible: the gateway may be gone, or have ended it."""
        with suppress(APIError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._say(session, "/rl/end_session", **how)

    async def _say(self, session: dict[str, Any], path: str, **body: Any) -> None:
        await self._admin.copy(api_key=session["api_key"]).post(path, cast_to=object, body=body)

    def _tell_that_it_is_gone(self, error: Exception) -> None:
        """Print it once for all agents."""
        if not self._is_gateway_gone:
            _tell(
                f"no gateway answers at {self._gateway} ({error.__cause__ or error}); asking until one does: "
                f"name it with --gateway, or {START_ONE}"
            )
        self._is_gateway_gone = True


def _message(error: APIStatusError) -> str:
    """Return what the gateway said."""
    match error.body:
        case {"message": str(message)}:
            return message
        case _:  # something else answers there
            return f"{error.status_code} {error.response.text[:200]}"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def main(options: argparse.Namespace, key: str) -> None:
    """Play until cancelled. Raises what `Agents.play_forever` raises."""
    playing = asyncio.current_task()
    assert playing is not None  # asyncio.run made one
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    numbers = count()
    async with (
        aclosing(Agents(options.gateway.rstrip("/"), key, options.group_size)) as agents,
        asyncio.TaskGroup() as players,
    ):
        for _ in range(options.groups):
            players.create_task(agents.play_forever(numbers))


def parse() -> tuple[argparse.Namespace, str]:
    """Return the options and the admin key; end with what to do when either is wrong."""
    parser = argparse.ArgumentParser(description="Agents for a gateway that stands alone.")
    parser.add_argument("--gateway", required=True, metavar="URL")
    parser.add_argument("--key-file", required=True, type=Path, help="the file with the gateway's admin key")
    parser.add_argument("--group-size", type=int, default=8, help="siblings a question, as in the trainer's config")
    parser.add_argument("--groups", type=int, default=8, help="questions at once")
    options = parser.parse_args()
    if not options.gateway.startswith(("http://", "https://")):
        parser.error(f"--gateway is {options.gateway!r}; give a URL, for example http://127.0.0.1:8000")
    for name in ("group_size", "groups"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")
    try:
        return options, options.key_file.read_text().strip()
    except OSError as error:
        parser.error(
            f"--key-file {options.key_file} cannot be read: {error.strerror}. A gateway makes the file as it starts "
            f"and prints where it is: if none runs yet, {START_ONE}"
        )


def run() -> str | int:
    """Play and return the exit code of the process."""
    outcome: str | int = 0
    try:
        asyncio.run(main(*parse()))
    except* Refused as refusals:
        outcome = str(_one_of(refusals))
    except* asyncio.CancelledError:
        outcome = INTERRUPTED_CODE
    return outcome


def _one_of(error: BaseException) -> BaseException:
    return _one_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(run())
