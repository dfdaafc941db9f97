"""An engine that drains, over HTTP:

- it takes no new weights, which would be swapped under answers that are about to end
- a push that is under way when the drain begins, with its pause and resume, does not cut it short
"""

import asyncio
from dataclasses import dataclass

import pytest

from areal_agent.errors import EngineUnreachable
from areal_agent.types import FinishReason, GenerateResult, PauseMode, VersionSpan, WeightVersion

DRAIN_S = 1e4
SERVED, NEW = WeightVersion(step=7), WeightVersion(step=8)


@dataclass(kw_only=True)
class Scene:
    """An engine with an answer that cannot end until its memory is back."""

    served: object
    answer: asyncio.Future[GenerateResult]
    draining: asyncio.Future[None] | None = None

    @classmethod
    async def begin(cls, served, request) -> "Scene":
        await served.engine.release_memory()
        answer = asyncio.ensure_future(served.engine.generate(request))
        await served.until(lambda stats: stats.num_queued == 1)
        return cls(served=served, answer=answer)

    async def drain(self) -> None:
        """Begin to drain."""
        self.draining = asyncio.ensure_future(self.served.server.drain(DRAIN_S))
        while await self.served.engine.health():
            pass

    async def end(self) -> GenerateResult:
        """Check that the drain lasts exactly until the answer has ended."""
        await self.served.engine.info()
        assert not self.draining.done()
        await self.served.engine.resume_memory()
        result = await self.answer
        await self.draining
        return result


async def test_new_weights_are_refused_and_who_continues_does_not_end_it(other, served, ask):
    engine, scene = served.engine, await Scene.begin(served, ask(1))
    await scene.drain()
    for refused in (engine.load(other, NEW), engine.begin_push("p")):
        with pytest.raises(EngineUnreachable, match="is ending"):
            await refused
    await engine.pause(PauseMode.RETRACT)
    await engine.resume()
    result = await scene.end()
    assert result.finish_reason is FinishReason.LENGTH
    assert result.versions == (VersionSpan(version=SERVED, start=0, end=12),)


async def test_a_push_that_has_begun_ends(other, served, ask, share):
    engine, scene = served.engine, await Scene.begin(served, ask(1))
    await engine.begin_push("p")
    await engine.send_push("p", share(other))
    await scene.drain()
    await engine.pause(PauseMode.RETRACT)
    await engine.commit_push("p", NEW)
    await engine.resume()
    result = await scene.end()
    assert result.finish_reason is FinishReason.LENGTH
    assert result.versions == (VersionSpan(version=NEW, start=0, end=12),)
