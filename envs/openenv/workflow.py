"""One episode of an OpenEnv server: the model answers with actions, or calls the server's tools.

An action that the server refuses is told to the model. A server that cannot be reached, fails, dies or is late raises
SandboxError: that is not the model's failure.
"""

import json
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout, SandboxError
from sandboxes.tools import shortened

REFUSED = "(code: VALIDATION_ERROR)"


async def solve(task: dict[str, Any], rollout: Rollout) -> float | None:
    """Return the sum of the rewards, None when no step had one. An answer without a call ends an episode of tools."""
    from openenv.core import GenericEnvClient  # pyright: ignore  # may be missing

    client: Any = GenericEnvClient(task["url"], message_timeout_s=task["step_s"])
    async with Episode(client, task["url"]) as episode:
        text = f"{task['prompt']}\n\n{text_of(await episode.send(client.reset, **task['reset']))}".strip()
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        options: dict[str, Any] = {}
        if task["field"] is None:
            options["tools"] = await episode.tools()
        for turn in range(1, task["max_turns"] + 1):
            reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages, **options)
            message = reply.choices[0].message
            messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
            rollout.log(turns=turn)
            if task["field"] is not None:
                text = await episode.step({task["field"]: message.content or ""})
                messages.append({"role": "user", "content": text})
            elif not message.tool_calls:
                break
            for call in message.tool_calls or ():
                if call.type == "function" and not episode.is_over:
                    text = await episode.call(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if episode.is_over:
                break
    return episode.reward


class Episode:
    """A session of a server: what its steps say as text, the rewards so far and whether it is over."""

    def __init__(self, client: Any, url: str) -> None:
        self.reward: float | None = None
        self.is_over = False
        self._client = client
        self._url = url

    async def __aenter__(self) -> "Episode":
        await self.send(self._client.connect)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def send(self, method: Any, *args: Any, **options: Any) -> Any:
        """Call a method of the client. Raises ValueError for a refused action, SandboxError for all other failures."""
        try:
            return await method(*args, **options)
        except Exception as error:  # the boundary: a client of sockets, and what servers say through it
            if REFUSED in str(error):
                raise ValueError(str(error)) from error
            raise SandboxError(f"the OpenEnv server {self._url}: {type(error).__name__}: {error}") from error

    async def step(self, action: dict[str, Any]) -> str:
        try:
            result = await self.send(self._client.step, action)
        except ValueError as error:
            return f"Error: {error}"
        if result.reward is not None:
            self.reward = (self.reward or 0.0) + float(result.reward)
        self.is_over = bool(result.done)
        return text_of(result)

    async def tools(self) -> list[dict[str, Any]]:
        """Return the server's tools in OpenAI's format."""
        result = await self.send(self._client.step, {"type": "list_tools"})
        names = (("name", "name"), ("description", "description"), ("parameters", "input_schema"))
        return [
            {"type": "function", "function": {ours: tool[theirs] for ours, theirs in names}}
            for tool in result.observation["tools"]
        ]

    async def call(self, name: str, arguments: str) -> str:
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments are no JSON: {error}"
        return await self.step({"type": "call_tool", "tool_name": name, "arguments": values})


def text_of(result: Any) -> str:
    """Return an observation for the model: a tool's error or result, else the only text or all as JSON."""
    seen = {key: value for key, value in result.observation.items() if key != "metadata"}  # which may hold answers
    if seen.get("error"):
        return f"Error: {seen['error'].get('message', seen['error'])}"
    if isinstance(found := seen.get("result"), dict) and "data" in found:
        seen = {"result": found["data"]}
    values = list(seen.values())
    return shortened(values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(seen))
