"""Agents that talk to a gateway, each in a session of its own, with a tool result of 400 characters per turn.

They speak chat completions, Responses (with the whole input each turn) or Anthropic's Messages.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

TOOL_CHARS = 400
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the library's index.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
]
SYSTEM = "You look things up in an index and answer questions about what you find. Call the tool until you know."


FUNCTION: dict[str, Any] = TOOLS[0]["function"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """How an agent asks, echoes an answer and sends a tool's result in one protocol."""

    path: str
    head: bytes  # the body up to the list that grows
    echo: Callable[[Any], Sequence[Any]]  # from the answer's body to the items that repeat it
    result: Callable[[str | None, str], Any]  # from the id of the call, if there was one, and the result


def _chat_echo(answer: Any) -> list[Any]:
    message = answer["choices"][0]["message"]
    return [{key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None}]


def _chat_result(call_id: str | None, text: str) -> Any:
    return {"role": "tool", "content": text, "tool_call_id": call_id} if call_id else {"role": "user", "content": text}


def _responses_result(call_id: str | None, text: str) -> Any:
    if call_id is None:
        return {"role": "user", "content": text}
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _messages_result(call_id: str | None, text: str) -> Any:
    block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
    return {"role": "user", "content": [block] if call_id else text}


def _opened(body: dict[str, Any], name: str) -> bytes:
    return orjson.dumps({"model": "default", **body}).removesuffix(b"}") + b',"' + name.encode() + b'":['


PROTOCOLS = {
    "chat": Protocol("/v1/chat/completions", _opened({"tools": TOOLS}, "messages"), _chat_echo, _chat_result),
    "responses": Protocol(
        "/v1/responses",
        _opened({"tools": [{"type": "function", **FUNCTION}], "instructions": SYSTEM}, "input"),
        lambda answer: answer["output"],
        _responses_result,
    ),
    "messages": Protocol(
        "/v1/messages",
        _opened(
            {
                "tools": [
                    {
                        "name": FUNCTION["name"],
                        "description": FUNCTION["description"],
                        "input_schema": FUNCTION["parameters"],
                    }
                ],
                "system": SYSTEM,
                "max_tokens": 1000,
            },
            "messages",
        ),
        lambda answer: [{"role": "assistant", "content": answer["content"]}],
        _messages_result,
    ),
}


def _call_id(echo: Sequence[Any]) -> str | None:
    """Return the id of the first call in an echoed answer of any protocol."""
    for item in echo:
        content = item.get("content")
        blocks = content if isinstance(content, list) else []
        for one in (item, *blocks, *item.get("tool_calls", ())):
            if one.get("type") == "function_call":
                return one["call_id"]
            if one.get("type") in ("function", "tool_use"):
                return one["id"]
    return None


class TurnFailed(Exception):
    """A gateway did not answer with 200."""


@dataclass(slots=True)
class Agent:
    """One conversation. Its history is kept encoded, so that the load costs less than what it measures."""

    http: aiohttp.ClientSession
    base_url: str
    admin_key: str
    text: str  # tool results are cut from it
    number: int
    protocol: Protocol = PROTOCOLS["chat"]
    latencies_s: list[float] = field(default_factory=list[float])
    _headers: dict[str, str] = field(default_factory=dict[str, str])
    _messages: list[bytes] = field(default_factory=list[bytes])
    _num_turns: int = 0

    @property
    def has_started(self) -> bool:
        return bool(self._messages)

    async def start(self) -> None:
        """Begin a new session."""
        self._num_turns = 0
        admin = {"Authorization": f"Bearer {self.admin_key}"}
        session = await self._post("/rl/start_session", {"task_id": f"task-{self.number}"}, admin)
        self._headers = {"Authorization": f"Bearer {session['api_key']}"}
        system = [orjson.dumps({"role": "system", "content": SYSTEM})] if self.protocol is PROTOCOLS["chat"] else []
        question = f"What does entry {self.number} say? {self._cut(100)}"
        self._messages = [*system, orjson.dumps({"role": "user", "content": question})]

    async def turn(self) -> None:
        """Make one call, and add the tool result that follows it."""
        body = self.protocol.head + b",".join(self._messages) + b"]}"
        started_s = time.perf_counter()
        answer = await self._send(self.protocol.path, body, self._headers)
        self.latencies_s.append(time.perf_counter() - started_s)
        echo = self.protocol.echo(answer)
        self._num_turns += 1
        result = self.protocol.result(_call_id(echo), self._cut(TOOL_CHARS))
        self._messages += map(orjson.dumps, [*echo, result])

    async def end(self) -> None:
        await self._post("/rl/set_reward", {"reward": 1.0}, self._headers)
        await self._post("/rl/end_session", {}, self._headers)

    def _cut(self, num_chars: int) -> str:
        start = (self.number * 7919 + self._num_turns * 1009) % (len(self.text) - num_chars)
        return self.text[start : start + num_chars]

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        return await self._send(path, orjson.dumps(body), headers)

    async def _send(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        headers = {"Content-Type": "application/json", **headers}
        async with self.http.post(self.base_url + path, data=body, headers=headers) as response:
            payload = await response.read()
            if response.status != 200:
                raise TurnFailed(f"{path} was answered with {response.status}: {payload[:300]!r}")
            return orjson.loads(payload)
