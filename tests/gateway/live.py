"""Runs servers on threads of their own, for synchronous clients. It is a helper, not a test."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from areal_agent.engine.fake import FakeEngine
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.bodies import Limits
from areal_agent.tokens.renderer import Renderer

from .conftest import ADMIN_KEY, VOCAB_SIZE, MemoryJournal

ANSWERS = (
    "hello world<|im_end|>",
    'I call <tool_call>{"name": "python", "arguments": {"x": 1}}</tool_call><|im_end|>',
    "<tool_call>{broken<|im_end|>",
    "<|im_end|>",
    "é\n\n ",
)


@contextlib.contextmanager
def live_gateway(
    renderer: Renderer, journal: MemoryJournal, *, vocab_size: int = VOCAB_SIZE, **options: Any
) -> Iterator[tuple[str, Gateway]]:
    """Serves until the block ends; its engine gives `ANSWERS` by the length of the prompt."""
    answers = [renderer.ids_of(text) for text in ANSWERS]
    gateway = Gateway(
        sampler=FakeEngine(lambda request: answers[len(request.input_ids) % len(answers)], vocab_size=vocab_size),
        renderer=renderer,
        journal=journal,
        model_name="model",
        admin_key=ADMIN_KEY,
        max_context_tokens=1000,
        vocab_size=vocab_size,
        limits=Limits(max_body_bytes=2**20),
        **options,
    )
    with on_a_thread(gateway.serve) as url:
        yield url, gateway


class Server(Protocol):
    @property
    def base_url(self) -> str: ...

    async def aclose(self) -> None: ...


@contextlib.contextmanager
def on_a_thread(start: Callable[[], Awaitable[Server]]) -> Iterator[str]:
    """Start a server on a thread of its own and return its address; close it when the block ends."""
    is_over, is_up, urls = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        server = await start()
        urls.append(server.base_url)
        is_up.set()
        try:
            await asyncio.to_thread(is_over.wait)
        finally:
            await server.aclose()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(120), "the server did not start"
        yield urls[0]
    finally:
        is_over.set()
        thread.join()
