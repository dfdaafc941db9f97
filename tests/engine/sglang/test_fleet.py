"""A fleet of two real SGLang servers that a run starts, disturbed in the middle of answers (slow):

- killed (SIGKILL): its answers go on at the other one, the same greedy tokens with exact versions; it is started again,
  and asks the trainer for the weights that were pushed meanwhile by torch.distributed
- stopped (SIGSTOP): the same, and it serves again after SIGCONT
- a damaged push leaves the old weights, and everybody serving
- a server that was started elsewhere is added: it gets the fleet's weights before it serves, and can be removed
"""

import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from areal_agent.errors import WeightUpdateError
from areal_agent.types import VersionSpan, WeightVersion
from areal_agent.weights.push import push

from ..servers import running_fleet
from ..transfers import open_channel, parameters_of
from .conftest import ON_CPU, Watched, serve_again

OLD, NEW, NEXT = (WeightVersion(step=step) for step in (7, 8, 9))
LENGTH = 500


@pytest.mark.slow
async def test_servers_are_killed_stopped_and_added(
    sglang_python, real_model, real_other, real_server, ask, share, tmp_path
):
    """One test: two servers take minutes to start."""
    async with AsyncExitStack() as stack:
        channel = stack.enter_context(open_channel(real_model))
        run = await stack.enter_async_context(
            running_fleet(real_model, tmp_path, python=sglang_python, hung_after_s=45.0, **ON_CPU)
        )
        fleet = run.fleet
        request = ask(1, max_tokens=LENGTH, temperature=0.0)
        truth = (await fleet.generate(request)).token_ids

        for version, blow in ((NEW, signal.SIGKILL), (NEXT, signal.SIGSTOP)):
            served = fleet.report()[0].version
            watched = Watched(fleet, replace(request, request_id=f"request-{version}"))
            await watched.until(5)
            victim = next(one.url for one in fleet.report() if one.num_requests)
            process_id = run.process_id(victim)
            os.kill(process_id, blow)
            result = await watched.answer
            assert tuple(watched.token_ids) == result.token_ids
            assert result.versions == (VersionSpan(version=served, start=0, end=LENGTH),)
            if blow is signal.SIGKILL:
                assert result.token_ids == truth
            pushed = channel.write(parameters_of(real_other)) if blow is signal.SIGKILL else share(real_other)
            await push([fleet], pushed, version)
            if blow is signal.SIGSTOP:
                os.kill(process_id, signal.SIGCONT)
            await run.until_all_serve(version)

        weights = share(real_other)
        with pytest.raises(WeightUpdateError, match="checksum"):
            await push([fleet], replace(weights, crc32=weights.crc32 ^ 1), WeightVersion(step=10))
        await run.until_all_serve(NEXT)

        await serve_again(real_server, real_model, OLD)
        await fleet.add(real_server)
        await run.until_all_serve(NEXT)
        await fleet.remove(run.engine.address.urls[0])
        await fleet.remove(run.engine.address.urls[1])
        result = await fleet.generate(replace(request, request_id="request-last"))
        assert result.versions == (VersionSpan(version=NEXT, start=0, end=LENGTH),)
