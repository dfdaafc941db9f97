"""The memory of an engine of several servers, which is lent to a trainer:

- one that has died, which nobody has noticed yet, holds up neither lending nor giving back: the others do both
- one that cannot take its memory again is an error
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.cluster.engines import memory_of
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.errors import EngineRejected
from areal_agent.protocols import MemoryHolder

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
    runner = Runner(ModelRunner.load(str(small_model), device="cpu", num_slots=2, max_context_tokens=64))
    async with AsyncExitStack() as stack:
        server = await EngineServer.start(runner)  # type: ignore[arg-type]
        stack.push_async_callback(server.aclose)
        urls = (server.base_url, NOBODY)
        fleet = await stack.enter_async_context(aclosing(EngineAddress(backend="embedded", urls=urls).connect()))
        yield await stack.enter_async_context(memory_of(fleet, urls)), runner


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
