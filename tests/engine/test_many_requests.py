"""Two thousand requests at once, over HTTP to the engine process, which has room for a fraction of them:

- every request is answered in full
- a second wave takes no more memory than the first, apart from fragmentation
"""

import asyncio
import resource

import pytest

from areal_agent.engine.client import HttpEngine
from areal_agent.process import allow_many_connections, peak_memory_bytes
from areal_agent.types import FinishReason, GenerateRequest, PauseMode
from tests.engine.test_process import process

NUM_REQUESTS = 2000
STRAY_BYTES = 64 * 2**20


@pytest.mark.slow
async def test_two_thousand_queued_requests_over_http(tiny, ask):
    allow_many_connections()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NUM_REQUESTS + 500:
        pytest.skip("this machine lets a process have too few open files")
    async with process(tiny, "--max-running", "64", "--kv-tokens", "2000") as child:
        line = (await child.stdout.readline()).decode()
        engine = HttpEngine(line.split()[-1])
        peaks: list[int] = []
        for wave in range(2):
            await answer_wave(engine, [ask(wave * NUM_REQUESTS + number) for number in range(NUM_REQUESTS)])
            peaks.append(peak_memory_bytes(child.pid) or 0)
        stats = await engine.stats()
        await engine.aclose()
    assert stats.generated_tokens == 2 * NUM_REQUESTS * 12
    assert (stats.num_running, stats.num_queued) == (0, 0)
    assert peaks[1] <= peaks[0] + STRAY_BYTES, peaks


async def answer_wave(engine: HttpEngine, requests: list[GenerateRequest]) -> None:
    """Send all requests, and let the first be answered only when all of them wait in the engine."""
    await engine.pause(PauseMode.RETRACT)
    answers = [asyncio.create_task(engine.generate(request)) for request in requests]
    while (await engine.stats()).num_queued < len(requests):
        pass
    await engine.resume()
    for result in await asyncio.gather(*answers):
        assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 12)
