"""A conversation with the tools of an MCP server. Its answer is right when the task's stands in it."""

from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.mcp.tools import CALL_S, open_tools

MAX_TURNS = 8


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the last answer holds `answer`. The task also has `messages` and `server`, perhaps `call_s`."""
    messages: list[ChatCompletionMessageParam] = list(task["messages"])
    async with open_tools(task["server"], call_s=task.get("call_s", CALL_S)) as tools:
        for _ in range(task.get("max_turns", MAX_TURNS)):
            reply = await rollout.client.chat.completions.create(
                model=rollout.model,
                messages=messages,
                tools=tools.definitions,  # pyright: ignore[reportArgumentType]
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return float(str(task["answer"]) in (message.content or ""))
            messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
            for call in message.tool_calls:
                if call.type == "function":
                    text = await tools.call(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return 0.0
