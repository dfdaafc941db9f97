"""An engine that drains, over HTTP:

- it takes no new weights: whoever finds that it does not serve does not swap them under answers that are about to end
- a push that is under way when it begins to drain, pauses and continues, does not cut it short
"""

import asyncio

import pytest

from areal_agent.engine_types import PauseMode
from areal_agent.errors import EngineUnreachable
from areal_agent.types import FinishReason, VersionSpan, WeightVersion

DRAIN_S = 1e4
SERVED, NEW = WeightVersion(step=7), WeightVersion(step=8)


async def test_new_weights_are_refused_and_who_continues_does_not_end_it(tiny, other, serve, ask):
    async with serve(tiny) as served:
        engine = served.engine
        await engine.release_memory()  # so that the request cannot end by itself
        answer = asyncio.ensure_future(engine.generate(ask(1)))
        await served.until(lambda stats: stats.num_queued == 1)
        draining = asyncio.ensure_future(served.server.drain(DRAIN_S))
        while await engine.health():
            pass
        for refused in (engine.load(other, NEW), engine.begin_push("p")):
            with pytest.raises(EngineUnreachable, match="is ending"):
                await refused
        await engine.pause(PauseMode.RETRACT)
        await engine.resume()
        await engine.info()
        assert not draining.done()
        await engine.resume_memory()
        result = await answer
        await draining
    assert result.finish_reason is FinishReason.LENGTH
    assert result.versions == (VersionSpan(version=SERVED, start=0, end=12),)


async def test_a_push_that_has_begun_ends(tiny, other, serve, ask, share):
    async with serve(tiny) as served:
        engine = served.engine
        await engine.release_memory()
        answer = asyncio.ensure_future(engine.generate(ask(1)))
        await served.until(lambda stats: stats.num_queued == 1)
        await engine.begin_push("p")
        await engine.send_push("p", share(other))
        draining = asyncio.ensure_future(served.server.drain(DRAIN_S))
        while await engine.health():
            pass
        await engine.pause(PauseMode.RETRACT)
        await engine.commit_push("p", NEW)
        await engine.resume()
        await engine.info()
        assert not draining.done()
        await engine.resume_memory()
        result = await answer
        await draining
    assert result.finish_reason is FinishReason.LENGTH
    assert result.versions == (VersionSpan(version=NEW, start=0, end=12),)
