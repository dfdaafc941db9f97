"""A container that has next to no CPU, as every container of a machine that is much too busy.

1. a thousand programs at once all run, each within its own time; 2. a thousand that are cancelled at once do the
container no harm.
"""

import asyncio

import pytest

from sandboxes.containers.provider import DockerProvider
from sandboxes.spec import CellSpec, Limits, Program, Status

pytestmark = pytest.mark.slow

NUM_PROGRAMS = 1000
STARVED = Limits(wall_s=10.0, cpus=0.3, pids=32)  # all together take longer than one may
TRUE = Program(argv=("true",))


async def test_a_thousand_programs_at_once(provider: DockerProvider) -> None:
    cell = await provider.create(CellSpec(limits=STARVED))
    calls = (cell.exec(TRUE, stdin=b"", limits=STARVED) for _ in range(NUM_PROGRAMS))
    results = await asyncio.gather(*calls)
    await cell.close()
    assert {result.status for result in results} == {Status.OK}


async def test_a_thousand_cancelled_at_once(provider: DockerProvider) -> None:
    many = Limits(wall_s=600.0, cpus=0.2, pids=NUM_PROGRAMS + 8, memory_bytes=2**31)
    cell = await provider.create(CellSpec(limits=many))
    sleep = Program(argv=("sleep", "1000"))
    calls = [asyncio.create_task(cell.exec(sleep, stdin=b"", limits=many)) for _ in range(NUM_PROGRAMS)]
    first = await cell.exec(TRUE, stdin=b"", limits=many)  # by its turn all others are on their way
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (await cell.exec(TRUE, stdin=b"", limits=many)).status is first.status is Status.OK
    await cell.close()
