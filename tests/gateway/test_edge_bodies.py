"""Invalid keys and bodies:

- a key may be sent as bearer, `api-key` or `x-api-key`
- no answer and no log line contains a key, wherever the caller wrote it
- a body over the limit is refused unread, whether its length was announced or not
- a compressed body is refused; the Content-Type does not matter
- a repeated key is refused in control calls; in an agent's call the last one counts
- a body nested too deeply for the journal is refused
- an incomplete body and malformed chunks are the client's errors
- an unknown expectation gets an error object, too
"""

import gzip
import json
import logging

import pytest

from areal_agent.gateway.bodies import Limits

from .conftest import ADMIN_KEY, OpenAgent, OpenWorld
from .raw import is_error_object, parse, say

SECRET = "sk-this-key-is-a-secret-of-its-owner"
HEAD = (
    f"POST /rl/start_session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_KEY}\r\nConnection: close\r\n"
)


@pytest.mark.parametrize("header", ["api-key", "x-api-key", "X-API-KEY"])
async def test_other_headers_for_keys(open_world: OpenWorld, header: str) -> None:
    world = await open_world()
    async with world.http.get(f"{world.url}/v1/models", headers={header: ADMIN_KEY}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/v1/{SECRET}", {}),
        ("/v1/chat/completions", {"model": SECRET, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"model": "model", "messages": SECRET}),
        ("/v1/chat/completions", {SECRET: 1}),
        ("/rl/set_reward", {"reward": SECRET}),
    ],
)
async def test_keys_are_not_repeated(open_agent: OpenAgent, path: str, body: object) -> None:
    agent = await open_agent()
    status, answer = await agent.world.call(path, body, key=agent.key)
    assert status >= 400
    assert SECRET not in str(answer)


async def test_keys_are_not_logged(open_agent: OpenAgent, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    agent = await open_agent(script=[RuntimeError("a bug")])
    status, answer = await agent.post_chat()
    assert status == 500
    assert "failed" in caplog.text
    assert agent.key not in caplog.text + str(answer)


async def test_a_large_body(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(max_body_bytes=100))
    status, headers, body = parse(await say(world.url, f"{HEAD}Content-Length: 101\r\n\r\n".encode()))
    assert (status, headers["connection"], is_error_object(body)) == (413, "close", True)


async def test_a_body_without_an_end(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(max_body_bytes=100_000))
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    status, _, body = parse(await say(world.url, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode(), chunk, chunk))
    assert (status, is_error_object(body)) == (413, True)


async def test_a_body_of_just_the_limit(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(max_body_bytes=100))
    body = b'{"task_id": "t"}'
    assert (await world.call("/rl/start_session", body.ljust(100)))[0] == 200


async def test_a_compressed_body(open_world: OpenWorld) -> None:
    world = await open_world()
    bomb = gzip.compress(b" " * 2**20)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Encoding": "gzip"}
    async with world.http.post(f"{world.url}/rl/start_session", headers=headers, data=bomb) as response:
        assert response.status == 415
        assert is_error_object(await response.json())


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
async def test_any_content_type(open_world: OpenWorld, content_type: str) -> None:
    world = await open_world()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": content_type}
    data = b'{"task_id": "t"}'
    async with world.http.post(f"{world.url}/rl/start_session", headers=headers, data=data) as response:
        assert response.status == 200


async def test_a_reward_said_twice_in_one_body(open_agent: OpenAgent) -> None:
    agent = await open_agent()
    status, answer = await agent.world.call("/rl/set_reward", b'{"reward": 1, "reward": 0}', key=agent.key)
    assert (status, answer["error"]["param"]) == (400, "reward")


async def test_a_parameter_said_twice_in_a_call(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    body = b'{"model": "no", "messages": [{"role": "user", "content": "x"}], "model": "model"}'
    assert (await agent.world.call("/v1/chat/completions", body, key=agent.key))[0] == 200


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1" * 5000, '"\\ud800"', "[" * 2000 + "]" * 2000])
@pytest.mark.parametrize("path", ["/rl/set_reward", "/v1/chat/completions", "/v1/responses"])
async def test_values_that_are_not_json(open_agent: OpenAgent, path: str, number: str) -> None:
    agent = await open_agent()
    status, answer = await agent.world.call(path, f'{{"reward": {number}}}'.encode(), key=agent.key)
    assert (status, is_error_object(answer)) == (400, True)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "x", "extra": ...}]},
        {"role": "assistant", "tool_calls": [{"extra": ..., "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": ...}}}]},
        {"role": "assistant", "extra": ...},
        {"role": "user", "content": "", "id": ...},
    ],
    ids=["part", "call", "arguments", "answer", "question"],
)
async def test_messages_that_no_journal_could_write(open_agent: OpenAgent, message: dict[str, object]) -> None:
    agent = await open_agent("a<|im_end|>")
    nested = json.dumps({"model": "model", "messages": [message]}, default=lambda _: None)
    body = nested.replace("null", "[" * 300 + "]" * 300)
    status, answer = await agent.world.call("/v1/chat/completions", body.encode(), key=agent.key)
    assert (status, is_error_object(answer)) == (400, True)


async def test_chunks_that_are_none(open_world: OpenWorld) -> None:
    world = await open_world()
    answer = await say(world.url, f"{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
    status, _, body = parse(answer)
    assert (status, is_error_object(body)) == (400, True)


async def test_an_expectation_that_is_unknown(open_world: OpenWorld) -> None:
    world = await open_world()
    status, _, body = parse(await say(world.url, f"{HEAD}Expect: a miracle\r\nContent-Length: 0\r\n\r\n".encode()))
    assert (status, is_error_object(body)) == (417, True)
