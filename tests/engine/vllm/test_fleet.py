"""A fleet of two real vLLM servers that a run starts, with weights by torch.distributed (slow): both receive the same;
after one is killed and started again, it asks the trainer for the weights that it missed.
"""

import os
import signal
from contextlib import aclosing

import pytest

from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.vllm.server import VllmServer
from areal_agent.types import VersionSpan, WeightVersion
from areal_agent.weights.push import push

from ..servers import running_fleet
from ..transfers import open_channel, parameters_of
from .conftest import ON_CPU

NEW, NEXT = WeightVersion(step=8), WeightVersion(step=9)

pytestmark = pytest.mark.slow


async def test_one_that_is_killed_asks_for_what_it_missed(vllm_python, vllm_model, vllm_other, ask, tmp_path):
    with open_channel(vllm_model) as channel:
        async with running_fleet(vllm_model, tmp_path, python=vllm_python, hung_after_s=60.0, **ON_CPU) as run:
            await push([run.fleet], channel.write(parameters_of(vllm_other)), NEW)
            urls = run.engine.address.urls
            before = [await answer(url, ask, NEW) for url in urls]
            assert before[0] == before[1]
            os.kill(run.process_id(urls[0]), signal.SIGKILL)
            await push([run.fleet], channel.write(parameters_of(vllm_model)), NEXT)
            await run.until_all_serve(NEXT)
            after = [await answer(url, ask, NEXT) for url in urls]
            assert after[0] == after[1] != before[0]


async def answer(url: str, ask, version: WeightVersion) -> tuple[int, ...]:
    """Return a server's answer to one request, under this version."""
    async with aclosing(ForeignEngine(VllmServer(url))) as engine:
        result = await engine.generate(ask(1, temperature=0.0))
    assert result.versions == (VersionSpan(version=version, start=0, end=12),)
    return result.token_ids
