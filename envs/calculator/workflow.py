"""One conversation: the model is asked, runs programs, reads what they print, and answers.

Ordinary agent code: a stock `openai` client and a sandbox.
"""

import json
import re
from contextlib import AbstractAsyncContextManager
from typing import Any

from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageParam,
    ChatCompletionMessageToolCallUnion,
    ChatCompletionToolParam,
)

from areal_agent import Rollout
from envs.calculator.reward import score
from sandboxes import Pool, Sandbox, Status, open_pool
from sandboxes.spec import ExecResult

MAX_TURNS = 4  # a program, a repair or two, and the answer

TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program; what it prints comes back.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string"}},
                "required": ["code"],
            },
        },
    }
]
ERROR = re.compile(r"\w*Error\b")
USAGE = 'Error: call python with {"code": "..."}'


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the model states the right number and a program printed it, else 0.0."""
    pool = await rollout.shared(open_sandboxes)
    sandbox = await rollout.enter(pool.acquire())
    messages: list[ChatCompletionMessageParam] = list(task["messages"])
    outputs: list[str] = []
    for _ in range(MAX_TURNS):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return score(message.content or "", outputs, task["answer"])
        messages.append(_echo(message))
        for call in message.tool_calls:
            output = await run_tool(sandbox, call)
            outputs.append(output)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        rollout.log(tool_calls=len(outputs), tool_failures=sum(map(is_failure, outputs)))
    return 0.0


def open_sandboxes(rollout: Rollout) -> AbstractAsyncContextManager[Pool]:
    """Open the pool that all rollouts of a run share."""
    return open_pool(**rollout.sandbox)


async def run_tool(sandbox: Sandbox, call: ChatCompletionMessageToolCallUnion) -> str:
    """Return what the model reads: the output of its program, or the last line of its error."""
    code = _code_of(call)
    return USAGE if code is None else _readable(await sandbox.exec_python(code))


def is_failure(output: str) -> bool:
    """Return whether an output is an error: `NameError: ...`, or a message of `run_tool`.

    >>> is_failure("NameError: name 'x' is not defined"), is_failure("42")
    (True, False)
    """
    return ERROR.match(output) is not None


def _code_of(call: ChatCompletionMessageToolCallUnion) -> str | None:
    """Return the program of a call; None when it has none, whatever the model wrote instead."""
    if call.type != "function" or call.function.name != "python":
        return None
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        return None
    code = arguments.get("code") if isinstance(arguments, dict) else None
    return code if isinstance(code, str) else None


def _readable(result: ExecResult) -> str:
    if result.status is Status.OK:
        return result.stdout.decode(errors="replace").strip()
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"Error: {result.status}"


def _echo(message: ChatCompletionMessage) -> ChatCompletionMessageParam:
    """Return the model's message in the form of the history."""
    return message.to_dict()  # pyright: ignore[reportReturnType]  # what was received may be sent
