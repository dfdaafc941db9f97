"""Several servers as one engine, over the client for SGLang's servers: their shared folders and numbers.

- a push reaches all and writes its folder once; a server that missed it gets the same folder, not written again
- folders that a departed server used are no longer kept for it
- servers with different models are refused
"""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from areal_agent.engine.address import EngineAddress
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberState
from areal_agent.errors import EngineRejected
from areal_agent.types import WeightVersion
from areal_agent.weights.push import push

NEW = WeightVersion(step=8)


def fleet_of(*served) -> Fleet:
    return EngineAddress(backend="sglang", urls=tuple(one.engine.base_url for one in served)).connect()


async def test_a_push_is_written_once_also_for_one_that_missed_it(serve, tiny, share, other):
    async with serve(tiny) as one, serve(tiny) as two, serve(tiny) as late, aclosing(fleet_of(one, two)) as fleet:
        weights = share(other)
        folders = Path(weights.path).parent / "folders"
        await push([fleet], weights, NEW)
        (written,) = folders.iterdir()
        assert (await fleet.info()).weight_version == NEW
        await asyncio.to_thread(Path(weights.path).write_bytes, b"the next weights are being written here")
        await fleet.add(late.engine.base_url)
        assert list(folders.iterdir()) == [written]
        assert [(await served.engine.info()).weight_version for served in (one, two, late)] == [NEW] * 3
        assert [one.state for one in fleet.report()] == [MemberState.SERVING] * 3
        await fleet.remove(one.engine.base_url)
        await push([fleet], share(tiny), WeightVersion(step=9))
        assert list(folders.iterdir()) == []  # the next one has its own place


async def test_servers_with_different_models_are_refused(serve, tiny, make_model):
    async with serve(tiny) as one, serve(make_model(vocab_size=101)) as other:
        fleet = fleet_of(one, other)
        with pytest.raises(EngineRejected, match="different models"):
            await fleet.info()
        await fleet.aclose()
