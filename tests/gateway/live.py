"""Runs a gateway on a thread of its own, for synchronous clients. It is a helper, not a test."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

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
def live_gateway(renderer: Renderer, journal: MemoryJournal) -> Iterator[tuple[str, Gateway]]:
    """Serves until the block ends; its engine gives `ANSWERS` by the length of the prompt."""
    answers = [renderer.ids_of(text) for text in ANSWERS]
    gateway = Gateway(
        sampler=FakeEngine(lambda request: answers[len(request.input_ids) % len(answers)], vocab_size=VOCAB_SIZE),
        renderer=renderer,
        journal=journal,
        model_name="model",
        admin_key=ADMIN_KEY,
        max_context_tokens=1000,
        vocab_size=VOCAB_SIZE,
        limits=Limits(max_body_bytes=2**20),
    )
    is_over = threading.Event()
    urls: list[str] = []
    is_up = threading.Event()

    async def serve() -> None:
        served = await gateway.serve()
        urls.append(served.base_url)
        is_up.set()
        try:
            await asyncio.to_thread(is_over.wait)
        finally:
            await served.aclose()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(120), "the gateway did not start"
        yield urls[0], gateway
    finally:
        is_over.set()
        thread.join()
