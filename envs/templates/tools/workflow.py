"""The model calls a tool, a function of this process, reads what it returns, and answers."""

import json
from typing import Any

from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from areal_agent import Rollout

from .tasks import score, stock_of

MAX_TURNS = 3
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "How many there are of an item.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return score(message.content or "", task["item"])
        messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
        for call in message.tool_calls:
            said = run_tool(call.function.arguments) if call.type == "function" else "Error: call stock"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return 0.0


def run_tool(arguments: str) -> str:
    """Return what the model reads; `arguments` is whatever it wrote.

    >>> run_tool('{"item": "1234"}'), run_tool("{")
    ('8046', 'Error: call stock with {"item": "..."}')
    """
    try:
        return stock_of(str(json.loads(arguments)["item"]))
    except (ValueError, TypeError, KeyError):
        return 'Error: call stock with {"item": "..."}'
