"""Agents that talk to a gateway, each in a session of its own, with a tool result of 400 characters per turn."""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

TOOL_CHARS = 400
TOOLS = [
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
        self._messages = [
            orjson.dumps({"role": "system", "content": SYSTEM}),
            orjson.dumps({"role": "user", "content": f"What does entry {self.number} say? {self._cut(100)}"}),
        ]

    async def turn(self) -> None:
        """Make one call, and add the tool result that follows it."""
        head = b'{"model":"default","tools":' + orjson.dumps(TOOLS) + b',"messages":['
        started_s = time.perf_counter()
        answer = await self._send("/v1/chat/completions", head + b",".join(self._messages) + b"]}", self._headers)
        self.latencies_s.append(time.perf_counter() - started_s)
        message = answer["choices"][0]["message"]
        echo = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None}
        self._messages.append(orjson.dumps(echo))
        self._num_turns += 1
        result: dict[str, Any] = {"role": "tool", "content": self._cut(TOOL_CHARS)}
        if echo.get("tool_calls"):
            result["tool_call_id"] = echo["tool_calls"][0]["id"]
        else:
            result["role"] = "user"
        self._messages.append(orjson.dumps(result))

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
