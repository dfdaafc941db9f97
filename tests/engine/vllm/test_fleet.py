"""A fleet of two real vLLM servers that a run starts, with weights by torch.distributed (slow): both receive the same;
after one is killed and started again, it asks the trainer for the weights that it missed.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_agent.cluster.engines import open_engine
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberState
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.vllm.server import VllmServer
from areal_agent.types import VersionSpan, WeightVersion
from areal_agent.weights.channels import DistributedChannel
from areal_agent.weights.push import push

from ..servers import STARTUP_S
from ..sglang.conftest import CONTEXT
from ..transfers import open_channel, parameters_of

OLD, NEW, NEXT = (WeightVersion(step=step) for step in (7, 8, 9))
DEADLINE_S = 1200.0  # only a hang is longer

pytestmark = pytest.mark.slow


@pytest.fixture
def channel(vllm_model: Path) -> Iterator[DistributedChannel]:
    with open_channel(vllm_model) as channel:
        yield channel


async def test_one_that_is_killed_asks_for_what_it_missed(vllm_python, vllm_model, vllm_other, channel, ask, tmp_path):
    config = EngineConfig(
        backend="vllm",
        python=vllm_python,
        num_servers=2,
        max_context_tokens=CONTEXT,
        kv_tokens=8 * CONTEXT,
        max_running_requests=16,
        startup_timeout_s=STARTUP_S,
        hung_after_s=60.0,
        wait_s=STARTUP_S,
    )
    async with asyncio.timeout(DEADLINE_S), open_engine(config, vllm_model, OLD, tmp_path) as engine:
        fleet, servers = engine.client, engine.servers
        assert isinstance(fleet, Fleet) and servers is not None
        await push([fleet], channel.write(parameters_of(vllm_other)), NEW)
        before = await answers(servers.urls, ask, NEW)
        assert before[0] == before[1]
        os.kill(next(iter(servers.process_ids().values())), signal.SIGKILL)
        await push([fleet], channel.write(parameters_of(vllm_model)), NEXT)
        while any(  # noqa: ASYNC110 (a fleet tells nobody of its servers' states)
            one.state is not MemberState.SERVING or one.version != NEXT for one in fleet.report()
        ):
            await asyncio.sleep(0.5)
        after = await answers(servers.urls, ask, NEXT)
        assert after[0] == after[1] != before[0]


async def answers(urls: tuple[str, ...], ask, version: WeightVersion) -> list[tuple[int, ...]]:
    """Return each server's answer to one request, under this version."""
    said: list[tuple[int, ...]] = []
    for url in urls:
        engine = ForeignEngine(VllmServer(url))
        try:
            result = await engine.generate(ask(1, temperature=0.0))
        finally:
            await engine.aclose()
        assert result.versions == (VersionSpan(version=version, start=0, end=12),)
        said.append(result.token_ids)
    return said
