"""A run's engines: `/rl/engines` and the memory that they lend, over real embedded servers in this process.

- The servers are shown as they are; one joins with the weights that are served, and one leaves.
- What cannot be done is an error with a code of its own; a wrong body is refused.
- The control has a key of its own, in a file for its owner alone; the files are gone when the run is.
- A server that has died unnoticed holds up neither lending memory nor giving it back; one that cannot take its memory
  again is an error.
"""

import os
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from areal_agent.cluster.engines import RunningEngine, memory_of, open_engine_control
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.errors import EngineRejected
from areal_agent.protocols import MemoryHolder
from areal_agent.types import WeightVersion
from tests.cluster.conftest import serving

SERVED = WeightVersion(step=7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A fleet of one server, and its calls."""

    url: str
    http: httpx.AsyncClient
    key: str
    folder: Path
    serve: Callable[..., Awaitable[str]]

    async def post(self, **body: object) -> httpx.Response:
        return await self.http.post("/rl/engines", json=body)

    async def urls(self) -> list[str]:
        return [one["url"] for one in (await self.http.get("/rl/engines")).json()["engines"]]


@pytest_asyncio.fixture
async def stage(tmp_path: Path, small_model: Path) -> AsyncGenerator[Stage]:
    async with AsyncExitStack() as stack:

        async def serve(model: Path = small_model, **options: Any) -> str:
            return (await stack.enter_async_context(serving(model, **options))).base_url

        url = await serve(version=SERVED)
        address = EngineAddress(backend="embedded", urls=(url,))
        fleet = address.connect()
        stack.push_async_callback(fleet.aclose)
        await fleet.info()
        fleet.pushes.begin_with(small_model, SERVED)
        files = {"url_file": tmp_path / "url", "key_file": tmp_path / "key"}
        engine = RunningEngine(client=fleet, address=address)
        await stack.enter_async_context(open_engine_control(engine, **files))
        key = files["key_file"].read_text().strip()
        http = httpx.AsyncClient(
            base_url=files["url_file"].read_text().strip(),
            headers={"Authorization": f"Bearer {key}"},
            timeout=300.0,
            trust_env=False,
        )
        await stack.enter_async_context(http)
        yield Stage(url=url, http=http, key=key, folder=tmp_path, serve=serve)
    assert not os.listdir(tmp_path)


async def test_servers_are_shown_join_and_leave(stage: Stage) -> None:
    shown = (await stage.http.get("/rl/engines")).json()
    assert shown == {
        "engines": [{"url": stage.url, "state": "serving", "reason": None, "version": "0:7", "requests": 0}]
    }
    another = await stage.serve(version=WeightVersion(incarnation=2, step=9))
    answer = await stage.post(add=f"{another}/")
    assert answer.status_code == 200, answer.text
    assert [(one["url"], one["state"], one["version"]) for one in answer.json()["engines"]] == [
        (stage.url, "serving", "0:7"),
        (another, "serving", "0:7"),
    ]
    answer = await stage.post(remove=stage.url)
    assert [one["url"] for one in answer.json()["engines"]] == [another]


async def test_what_cannot_be_is_an_error_with_a_code(stage: Stage, tmp_path: Path) -> None:
    no_server, short = "http://127.0.0.1:1", await stage.serve(max_context_tokens=64)
    for body, status, code in (
        ({"remove": no_server}, 404, "unknown_server"),
        ({"remove": stage.url}, 409, "last_server"),
        ({"add": stage.url}, 409, "known_server"),
        ({"add": stage.url.replace("127.0.0.1", "localhost")}, 409, "known_server"),
        ({"add": short}, 409, "another_model"),
        ({"add": no_server}, 502, "server_failed"),
        ({"add": str(stage.http.base_url)}, 409, "another_engine"),
    ):
        answer = await stage.post(**body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert await stage.urls() == [stage.url]


async def test_a_wrong_body_is_refused(stage: Stage) -> None:
    for body in (
        {},
        {"add": "http://a", "remove": "http://b"},
        {"add": 7},
        {"add": "127.0.0.1:1"},
        {"add": "http://"},
        {"add": "http://a:b"},
        {"add": "ftp://a"},
        {"add": "http://a/path"},
        {"add": "http://me:secret@a"},
        {"add": "http://a?b"},
        {"add": "http://[::1"},
        {"add": "http://a\n"},
        {"delete": "http://a"},
        {"add": "http://a", "force": True},
    ):
        answer = await stage.post(**body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], (body, answer.text)
    assert await stage.urls() == [stage.url]


async def test_it_takes_its_own_key_which_only_its_owner_can_read(stage: Stage) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer sk-another"}):
        for call in (stage.http.get("/rl/engines", headers=headers), stage.http.post("/rl/engines", headers=headers)):
            assert (await call).status_code == 401
    assert stat.S_IMODE((stage.folder / "key").stat().st_mode) == 0o600
    assert (await stage.http.post("/rl/start_session", json={"task_id": "t"})).status_code == 404


NOBODY = "http://127.0.0.1:1"


class Runner:
    """A ModelRunner that knows whether it has its memory."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.has_memory = True
        self.may_resume = True

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

    def release_memory(self) -> None:
        self._runner.release_memory()
        self.has_memory = False

    def resume_memory(self) -> None:
        if not self.may_resume:
            raise EngineRejected("there is no room")
        self._runner.resume_memory()
        self.has_memory = True


@pytest_asyncio.fixture
async def lent(small_model: Path) -> AsyncGenerator[tuple[MemoryHolder, Runner]]:
    runner = Runner(ModelRunner(str(small_model), device="cpu", num_slots=2, max_context_tokens=64))
    async with AsyncExitStack() as stack:
        server = await EngineServer.start(runner)  # type: ignore[arg-type]
        stack.push_async_callback(server.aclose)
        urls = (server.base_url, NOBODY)
        fleet = await stack.enter_async_context(aclosing(EngineAddress(backend="embedded", urls=urls).connect()))
        yield await stack.enter_async_context(memory_of(fleet, EngineAddress(backend="embedded", urls=urls))), runner


async def test_one_that_is_gone_holds_up_nobody(lent) -> None:
    memory, runner = lent
    await memory.release_memory()
    assert not runner.has_memory
    await memory.resume_memory()
    assert runner.has_memory


async def test_one_that_cannot_take_it_again_is_an_error(lent) -> None:
    memory, runner = lent
    await memory.release_memory()
    runner.may_resume = False
    with pytest.raises(EngineRejected, match="no room"):
        await memory.resume_memory()
