"""One episode of an OpenEnv server: the model's answers are its actions, or the model calls the server's tools.

An action that the server refuses, and a tool that fails, are told to the model. A server that cannot be reached, fails,
dies or is late, or a session that is lost, raises SandboxError: that is not the model's failure.
"""

import asyncio
import importlib
import json
from contextlib import suppress
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

from areal_agent import ConfigError, Rollout, SandboxError
from envs.openenv.tasks import require_openenv
from sandboxes.tools import shortened

REFUSED = "(code: VALIDATION_ERROR)"
CLOSE_S = 2.0
"""The time that a server has to answer a goodbye: a stuck one would hold up a cancelled rollout."""


async def solve(task: dict[str, Any], rollout: Rollout) -> float | None:
    """Return the sum of the rewards, None when no step had one. Without calls, an answer ends an episode of tools."""
    require_openenv()
    core: Any = await asyncio.to_thread(importlib.import_module, "openenv.core")  # takes seconds, once
    async with Episode(core.GenericEnvClient(task["url"], message_timeout_s=task["step_s"]), task["url"]) as episode:
        seen = await episode.send("reset", **task["reset"])
        tools: dict[str, Any] = {"tools": await episode.tools()} if task["field"] is None else {}
        text = f"{task['prompt']}\n\n{text_of(seen)}".strip()
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        for turn in range(1, task["max_turns"] + 1):
            try:
                reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages, **tools)
            except openai.BadRequestError as error:
                if turn > 1 and error.code == "context_length_exceeded":
                    break
                raise
            message = reply.choices[0].message
            messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
            rollout.log(turns=turn)
            if task["field"] is not None:
                text = await episode.step({task["field"]: message.content or ""})
                messages.append({"role": "user", "content": text})
            for call in message.tool_calls or ():
                if call.type == "function" and not episode.is_over:
                    text = await episode.call(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if episode.is_over or (tools and not message.tool_calls):
                break
    return episode.reward


class Refused(SandboxError):
    """The server says that an action is none of its own."""


class Episode:
    """A session of a server: what its steps say as text, the rewards so far, and whether it is over."""

    def __init__(self, client: Any, url: str) -> None:
        self.reward: float | None = None
        self.is_over = False
        self._client = client
        self._url = url

    async def __aenter__(self) -> "Episode":
        await self.send("connect")
        self._socket = self._client._ws
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()

    async def send(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the client. Raises SandboxError, also where the client has connected anew by itself."""
        try:
            result = await getattr(self._client, method)(*args, **options)
            if method != "connect" and self._client._ws is not self._socket:
                raise ConnectionError("the connection was lost, and the session with it")
        except Exception as error:  # the boundary: a client of sockets, and what servers say through it
            kind = Refused if REFUSED in str(error) else SandboxError
            why = f"{type(error).__name__}: {error}"
            raise kind(f"the OpenEnv server {self._url} failed at {method}: {why}") from error
        return result

    async def step(self, action: dict[str, Any]) -> str:
        try:
            result = await self.send("step", action)
        except Refused as error:
            return f"Error: {error.__cause__}"
        if result.reward is not None:
            self.reward = (self.reward or 0.0) + float(result.reward)
        self.is_over = bool(result.done)
        return text_of(result)

    async def tools(self) -> list[dict[str, Any]]:
        """Return the server's tools in OpenAI's format. Raises ConfigError when it has none."""
        try:
            seen = (await self.send("step", {"type": "list_tools"})).observation
        except Refused as error:
            raise ConfigError(f"{self._url} has no tools; name the field of its action as `field`") from error
        if fault := (seen.get("metadata") or {}).get("error"):
            raise SandboxError(f"the OpenEnv server {self._url} cannot list its tools: {fault}")
        names = (("name", "name"), ("description", "description"), ("parameters", "input_schema"))
        functions = [{ours: tool[theirs] for ours, theirs in names} for tool in seen["tools"]]
        return [{"type": "function", "function": function} for function in functions]

    async def call(self, name: str, arguments: str) -> str:
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments are no JSON: {error}"
        return await self.step({"type": "call_tool", "tool_name": name, "arguments": values})


def text_of(result: Any) -> str:
    """Return an observation for the model: a tool's error, its result, the only text that there is, or all as JSON."""
    seen = {key: value for key, value in result.observation.items() if key != "metadata"}  # which may hold answers
    if isinstance(error := seen.get("error"), dict):
        return f"Error: {error.get('message', error)}"
    if isinstance(found := seen.get("result"), dict) and "content" in found:
        return shortened("\n".join(part.get("text") or f"[{part['type']}]" for part in found["content"]))
    values = list(seen.values())
    return shortened(values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(seen))
