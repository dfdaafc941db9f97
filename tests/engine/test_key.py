"""The key of an engine that other machines can reach: every call but `/health` has to show it.

- Clients show the key that they are given, or that of the environment.
- A caller with another key or none is told what to set.
- An engine does not listen beyond loopback without a key.
- SGLang's and vLLM's servers demand it by a middleware of ours: of calls, and of web sockets.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from areal_agent.engine.__main__ import main
from areal_agent.engine.address import KEY_VARIABLE, EngineAddress
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.engine.foreign.key import KeyDemanded
from areal_agent.errors import ConfigError, EngineRejected

KEY = "sk-of-this-engine"


@pytest.fixture
async def url(tiny):
    runner = ModelRunner(str(tiny), device="cpu", num_slots=2, max_context_tokens=64)
    async with aclosing(await EngineServer.start(runner, key=KEY)) as server:
        yield server.base_url


async def test_a_client_with_the_key_is_answered(url, ask):
    async with aclosing(HttpEngine(url, key=KEY)) as engine:
        assert (await engine.info()).max_context_tokens == 64
        assert (await engine.generate(ask())).token_ids


@pytest.mark.parametrize("key", [None, "another", "é"])
async def test_others_are_told_what_to_set(url, key):
    async with aclosing(HttpEngine(url, key=key)) as engine:
        assert await engine.health()
        with pytest.raises(EngineRejected, match=f"demands the key that it was started with: set {KEY_VARIABLE}"):
            await engine.info()


async def test_the_environment_may_have_the_key(url, monkeypatch):
    with pytest.raises(EngineRejected, match=KEY_VARIABLE):
        await EngineAddress.of_server(url)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    address = await EngineAddress.of_server(url)
    assert address.backend == "embedded"
    assert KEY not in repr(address)
    async with aclosing(address.connect()) as fleet:
        assert (await fleet.info()).max_context_tokens == 64


def test_an_engine_without_a_key_stays_on_loopback(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets other machines connect, and there is no key"):
        main(["--model", str(tmp_path), "--host", "0.0.0.0"])


@pytest.mark.parametrize(
    ("scope", "answer"),
    [
        ({"type": "http", "path": "/collective_rpc"}, 401),
        ({"type": "http", "path": "/healthy"}, 401),
        ({"type": "http", "path": "/v1", "headers": [(b"authorization", b"Bearer another")]}, 401),
        ({"type": "websocket", "path": "/v1/realtime"}, "websocket.close"),
        ({"type": "http", "path": "/v1", "headers": [(b"authorization", f"Bearer {KEY}".encode())]}, "app"),
        ({"type": "http", "path": "/health"}, "app"),
        ({"type": "lifespan"}, "app"),
    ],
)
async def test_a_foreign_server_answers_who_has_the_key(scope, answer, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    sent: list[dict[str, Any]] = []

    async def app(_scope: object, _receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        await send({"type": "app"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await KeyDemanded(app)(scope, None, send)
    assert answer in (sent[0].get("status"), sent[0]["type"])
    assert (answer == 401) == (KEY_VARIABLE.encode() in sent[-1].get("body", b""))
