"""Executions of all kinds (600 slow, 2,000 full) leave nothing behind; what an open pool holds is seen as left."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "sandboxes"
HELD_BY_AN_OPEN_POOL = """
import asyncio
from soak import held, leaks
from sandboxes import open_pool

async def main():
    for backend in ("jail", "docker"):
        before = held()
        async with open_pool(backend=backend) as pool, pool.acquire() as box:
            await box.exec_python("")
            print(*leaks(before, held()))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [600, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", ["jail", "docker"])
async def test_nothing_is_left_behind(pool_at, backend: str, number: int) -> None:
    await pool_at(backend)
    command = [sys.executable, str(BENCHMARK), "--soak", str(number), "--backend", backend]
    soak = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert soak.returncode == 0, soak.stdout + soak.stderr


async def test_what_is_held_is_seen(pool_at) -> None:
    await pool_at("jail")
    await pool_at("docker")
    command = [sys.executable, "-c", HELD_BY_AN_OPEN_POOL]
    found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True, cwd=BENCHMARK)
    for seen, line in zip(("groups", "containers"), found.stdout.splitlines(), strict=True):
        assert {"descriptors", "processes", seen} <= set(line.split())
