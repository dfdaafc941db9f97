"""Mutated requests at a steady rate: odd fields, damaged JSON, deep nesting, headers, paths, broken connections.

Each goes over a socket of its own, so that no client library corrects it. Every HTTP answer below 500 is right, and
none where the fuzzer breaks the connection. A session ends after `CALLS_A_SESSION` calls, and the next one begins.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from areal_agent.gateway.openapi import openapi_document
from benchmarks.gateway.agents import PROTOCOLS

CALLS_A_SESSION = 200
PATIENCE_S = {"headers": 2.0, "line": 2.0, "broken": 0.0, "hang-up": 0.0}  # where a body may be missing; else for long
LONG_PATIENCE_S = 120.0
SAID = [{"role": role, "content": f"said by the {role}"} for role in ("user", "assistant", "user")]
LISTS = {"chat": "messages", "responses": "input", "messages": "messages"}
BODIES: dict[str, dict[str, Any]] = {
    **{one.path: {**json.loads(one.head + b"]}"), LISTS[name]: SAID} for name, one in PROTOCOLS.items()},
    "/v1/completions": {"model": "default", "prompt": ["a", "b"], "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "default", "messages": SAID},
    "/v1/tokenize": {"messages": SAID},
    "/rl/set_reward": {"reward": 0.5},
    "/rl/start_session": {"task_id": "fuzz"},
    "/export_trajectories": {"session_id": "fuzz"},
    "/rl/lease": {"step": 1, "num_groups": 1},
}
OF_ADMIN = ("/rl/start_session", "/export_trajectories")  # a lease would be the trainer's
DEEP, LONG = "[" * 3000 + "]" * 3000, "a" * 100_000
VALUES = r"""[
    null, true, -1, 0, 1, 5, 0.5, 1e308, 2147483648, 9223372036854775808, NaN, "", "auto", "low", "user", "-0",
    "\ud800", "\u0000", "\u202e\ud83e\uddd1\u200d", "LONG", "DEEP", "<|im_start|>", "<|im_end|>", "<tool_call>",
    [], {}, [[]], {"": null}, ["a"], {"5": 1.0}, {"a": {"b": 1}}, {"type": "image_url"}, {"type": "json_object"}
]"""
BROKEN = (b"", b"null", b"\xff\xfe{\x00", b"[" * 200_000, b'{"a":' * 100_000, b"1" * 100_000, b"{} {}")
HEADERS = """Content-Type: text/plain|Content-Encoding: gzip|Expect: 100-continue|Content-Length: -1|Host: a|: a|Colon
Content-Length: 5|Transfer-Encoding: chunked|Authorization: Bearer|x-api-key: \xe9|Origin: http://a|Upgrade: websocket
Cookie: \x01|Content-Type: a/json; charset=utf-16|X-Long: LONG""".replace("\n", "|").split("|")
METHODS = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "post", "G\xc9T", "LONG")
PATHS = ("//v1//models", "/%00", "/v1/models/%ff", "/LONG", "/../v1", "*", "http://b/v1", "/?a=%", "/\xe9", "/metrics")
VERSIONS = ("1.1", "1.0", "2.0", "9")


def fields() -> dict[str, list[str]]:
    """Return the names of the fields that a body may have, by path."""
    described = openapi_document(is_leased_from=True)
    schemas = described["components"]["schemas"]

    def of(path: str) -> list[str]:
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return list(schemas[body["$ref"].rsplit("/", 1)[1]]["properties"])

    return {path: of(path) for path in BODIES}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a JSON value with each of its keys."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [place for key, inner in items for place in ((value, key), *places(inner))]


def mutated(chance: random.Random, path: str, names: list[str]) -> bytes:
    """Return a body with fields added, replaced and left out; or with bytes changed or cut off; or another one."""
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(chance.randint(0, 4)):
        container, key = chance.choice(places(body) or [(body, chance.choice(names))])
        match chance.randrange(4) if body else 0:
            case 0:
                container[key] = chance.choice(json.loads(VALUES))
            case 1:
                del container[key]
            case _:
                body[chance.choice(names)] = chance.choice(json.loads(VALUES))
    data = bytearray(json.dumps(body).replace('"DEEP"', DEEP).replace("LONG", LONG).encode())
    how = chance.random()
    if how < 0.15:
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return chance.choice(BROKEN) if how > 0.95 else bytes(data[: chance.randrange(len(data))] if how > 0.9 else data)


@dataclass(kw_only=True)
class Fuzzer:
    """Sends `num_requests` within `duration_s`."""

    port: int
    admin_key: str
    num_requests: int
    duration_s: float
    chance: random.Random
    statuses: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[str] = field(default_factory=Counter[str])
    _names: dict[str, list[str]] = field(default_factory=fields)
    _key: str = ""

    async def play(self) -> None:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(self.num_requests):
                await asyncio.sleep(started_s + number * self.duration_s / self.num_requests - time.monotonic())
                if number % CALLS_A_SESSION == 0:
                    await self._end(self._key)
                    self._key = _key_in(await self._say(self._request("/rl/start_session", b'{"task_id":"fuzz"}')))
                group.create_task(self._one())
        await self._end(self._key)

    async def _one(self) -> None:
        """Send one request, and judge what comes back."""
        chance, path = self.chance, self.chance.choice(list(BODIES))
        data = self._request(path, mutated(chance, path, self._names[path]))
        how = chance.choices(("body", "headers", "line", "broken", "hang-up"), (70, 10, 10, 5, 5))[0]
        line, _, rest = data.partition(b"\r\n")
        if how == "headers":
            line += b"".join(b"\r\n" + one.encode("latin-1") for one in chance.sample(HEADERS, chance.randint(1, 3)))
            data = line.replace(b"LONG", LONG.encode()) + b"\r\n" + rest
        elif how == "line":
            words = (chance.choice(METHODS), chance.choice((path, *PATHS)), f"HTTP/{chance.choice(VERSIONS)}")
            data = " ".join(words).replace("LONG", LONG).encode("latin-1") + b"\r\n" + rest
        elif how == "broken":
            data = data[: chance.randrange(len(data))]
        answer = await self._say(data, PATIENCE_S.get(how, LONG_PATIENCE_S))
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "without an answer"
        self.statuses[status] += 1
        if status.startswith("5") or b'"server_error"' in answer or (how == "body" and not status.isdigit()):
            self.errors[f"fuzz: {how} of {path} is {status}, {_body(answer)[:300]!r}, for {data[:3000]!r}"] += 1
        if path == "/rl/start_session" and how != "line":
            await self._end(_key_in(answer))

    def _request(self, path: str, body: bytes, key: str = "") -> bytes:
        key = key or (self.admin_key if path in OF_ADMIN else self._key)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def _end(self, key: str) -> None:
        if key:
            await self._say(self._request("/rl/end_session", b'{"may_be_silent": true}', key))

    async def _say(self, data: bytes, patience_s: float = LONG_PATIENCE_S) -> bytes:
        """Return what comes until the other side closes, or until patience has an end; then hang up."""
        answer = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                async with asyncio.timeout(LONG_PATIENCE_S):
                    writer.write(data)
                    await writer.drain()
                async with asyncio.timeout(patience_s):
                    while piece := await reader.read(2**16):
                        answer += piece
            finally:
                writer.close()
        return answer


def _body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def _key_in(answer: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError):
        return json.loads(_body(answer))["api_key"]
    return ""
