"""Fixtures: a served gateway with a scripted engine and an in-memory journal, and clients for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from areal_agent.engine.fake import FakeEngine
from areal_agent.gateway.app import Gateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import SessionRecord, Trajectory, Turn
from tests.histories import open_ledger
from tests.tokens.conftest import byte_level

ADMIN_KEY = "sk-admin"
VOCAB_SIZE = 300
QUESTION: list[Any] = [{"role": "user", "content": "x"}]
TLS = httpx.create_ssl_context()  # takes as long as a test, and every client would make its own

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class MemoryJournal:
    """Keeps what the ledger would. `is_writing` is set while a turn waits for `may_write`."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionRecord] = {}
        self.turns: dict[str, list[Turn]] = {}
        self.closed: dict[str, Trajectory] = {}
        self.has_closed = asyncio.Event()
        self.is_writing = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def open_session(self, session: SessionRecord) -> None:
        self.sessions[session.id] = session
        self.turns[session.id] = []

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        self.is_writing.set()
        await self.may_write.wait()
        self.turns[session_id].append(turn)

    async def close_session(self, trajectory: Trajectory) -> None:
        self.closed[trajectory.session_id] = trajectory
        self.has_closed.set()


class WatchedEngine(FakeEngine):
    """A scripted engine that says when a request was ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.was_aborted = asyncio.Event()

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.was_aborted.set()


@dataclass(kw_only=True)
class World:
    """One gateway and everything around it."""

    gateway: Gateway
    url: str
    renderer: Renderer
    engine: WatchedEngine
    journal: MemoryJournal
    http: aiohttp.ClientSession
    clients: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def call(self, path: str, body: Any = None, *, key: str | None = ADMIN_KEY) -> tuple[int, Any]:
        """POST a body (bytes are sent as they are); returns status and decoded answer."""
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.http.post(self.url + path, headers=headers, **content) as response:
            return response.status, await response.json()

    async def start(self, **body: Any) -> "Agent":
        status, session = await self.call("/rl/start_session", {"task_id": "task"} | body)
        assert status == 200, session
        client = AsyncOpenAI(
            base_url=session["base_url"],
            api_key=session["api_key"],
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=TLS),
        )
        await self.clients.enter_async_context(client)
        return Agent(world=self, id=session["session_id"], key=session["api_key"], client=client)

    def ids(self, text: str) -> list[int]:
        """Return the ids that the model would sample to say this; `<|im_end|>` ends it."""
        return self.renderer.ids_of(text)


@dataclass(kw_only=True)
class Agent:
    """A session and its clients."""

    world: World
    id: str
    key: str
    client: AsyncOpenAI

    async def ask(self, messages: Any = "hello", **options: Any) -> Any:
        """Ask for a chat completion with the official client."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.client.chat.completions.create(model="model", messages=messages, **options)

    async def post_chat(self, **body: Any) -> tuple[int, Any]:
        """Ask for a chat completion over plain HTTP."""
        default = {"model": "model", "messages": [{"role": "user", "content": "hello"}]}
        return await self.world.call("/v1/chat/completions", default | body, key=self.key)

    async def under_way(
        self, call: Coroutine[Any, Any, Any], num_tokens: int = 0, *, num_requests: int = 1
    ) -> "asyncio.Task[Any]":
        """Begin a call; return it once the engine has its requests, and has sampled so many tokens of each."""
        task = asyncio.create_task(call)
        await self.world.engine.wait_for_requests(num_requests)
        self.world.engine.step(num_tokens)
        return task

    async def play(self) -> None:
        """Ask for a completion, give it a reward, and end the session."""
        await self.post_chat()
        await self.reward(reward=1)
        await self.end()

    async def reward(self, **body: Any) -> tuple[int, Any]:
        return await self.world.call("/rl/set_reward", body, key=self.key)

    async def end(self, **body: Any) -> tuple[int, Any]:
        return await self.world.call("/rl/end_session", body, key=self.key)

    def prompt(self, index: int = -1) -> str:
        """Return the text of a prompt that the engine was given."""
        engine, renderer = self.world.engine, self.world.renderer
        return renderer.text_of(engine.requests[index].input_ids, has_ended=False)

    @property
    def turns(self) -> list[Turn]:
        """Return the turns that the journal has of it."""
        return self.world.journal.turns[self.id]


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    special = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
    words = "user assistant tool system name arguments python hello world"
    return byte_level([words], vocab_size=VOCAB_SIZE, special=special)


@pytest.fixture(scope="session")
def renderer(backend: Tokenizer) -> Renderer:
    return new_renderer(backend, TEMPLATE)


@pytest.fixture(scope="session")
def thinking_renderer(backend: Tokenizer) -> Renderer:
    """Its template begins every answer inside the reasoning."""
    return new_renderer(
        backend, TEMPLATE.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
    )


def new_renderer(backend: Tokenizer, template: str) -> Renderer:
    return Renderer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template))


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    async with open_ledger(tmp_path) as ledger:
        yield ledger


OpenWorld = Callable[..., Awaitable[World]]
OpenAgent = Callable[..., Awaitable[Agent]]


@pytest.fixture
async def open_world(renderer: Renderer) -> AsyncIterator[OpenWorld]:
    """Opens gateways: `await open_world("text of each answer", ...)`, or with `script=` ids, errors, a function."""
    stack = AsyncExitStack()

    async def open_it(
        *texts: str,
        script: Any = None,
        is_stepped: bool = False,
        max_context_tokens: int = 1000,
        journal: Any = None,
        engine: Any = None,
        model: Renderer = renderer,
        vocab_size: int = VOCAB_SIZE,
        has_grammar: bool = False,
        **options: Any,
    ) -> World:
        engine = engine or WatchedEngine(
            [renderer.ids_of(text) for text in texts] if script is None else script,
            is_stepped=is_stepped,
            has_grammar=has_grammar,
        )
        journal = journal or MemoryJournal()
        gateway = Gateway(
            sampler=engine,
            renderer=model,
            journal=journal,
            model_name="model",
            admin_key=ADMIN_KEY,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            has_grammar=has_grammar,
            **options,
        )
        served = await gateway.serve()
        stack.push_async_callback(served.aclose)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        world = World(gateway=gateway, url=served.base_url, renderer=model, engine=engine, journal=journal, http=http)
        await stack.enter_async_context(world.clients)
        return world

    async with stack:
        yield open_it


@pytest.fixture
def open_agent(open_world: OpenWorld) -> OpenAgent:
    """Opens a gateway as `open_world` does, and starts a session there."""

    async def open_it(*texts: str, **options: Any) -> Agent:
        return await (await open_world(*texts, **options)).start()

    return open_it
