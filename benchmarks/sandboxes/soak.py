"""Many executions in a row, and what they leave behind: `python benchmarks/sandboxes --soak 10000 --backend jail`.

Programs of all kinds run: Python and executables, good ones and ones that fail, fork, run out of time, memory or disk,
or print too much. Every so often the sandbox is closed and another acquired. What this process and the system hold is
counted before and after, each time with every pool closed. Mounts are not: those of jails end with their processes, and
those of containers with these.
"""

import asyncio
import gc
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sandboxes import Isolation, Limits, Sandbox, SandboxSpec, Status, open_pool
from sandboxes.cgroups import hierarchies_here
from sandboxes.containers.confinement import OWNER_LABEL
from sandboxes.owner import PREFIX, own_tag
from sandboxes.pool import Backend

MIB = 2**20
EXECUTIONS_A_SANDBOX = 25
PATIENCE_S = 20
"""How long the kernel and the engine may take to remove what is dying."""
LOOP, HOARD = "while True: pass", "hoard = []\nwhile True: hoard.append(bytearray(2**20))"
DAEMONS = "import os, time\nfor _ in range(3): os.fork() or (os.setsid(), time.sleep(1000))"
FILL = "import os\nwhile True: open(os.urandom(8).hex(), 'wb').write(bytes(2**20))"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of program, which is every n-th that runs, and the ways in which it may end."""

    every: int
    act: str | list[str]
    ends: tuple[Status, ...]
    limits: Limits | None = None


KINDS = (
    Kind(every=200, act=LOOP, ends=(Status.TIMEOUT,), limits=Limits(wall_s=0.2)),
    Kind(every=150, act=HOARD, ends=(Status.MEMORY,), limits=Limits(wall_s=30.0, memory_bytes=48 * MIB)),
    Kind(every=75, act=FILL, ends=(Status.DISK, Status.MEMORY)),
    Kind(every=60, act="while True: print('x' * 4096)", ends=(Status.OUTPUT_LIMIT,)),
    Kind(every=40, act=DAEMONS, ends=(Status.OK,)),
    Kind(every=7, act="raise ValueError", ends=(Status.NONZERO,)),
    Kind(every=5, act=["no such program"], ends=(Status.NONZERO,)),
    Kind(every=3, act=["sh", "-c", "cat | wc -c"], ends=(Status.OK,)),
    Kind(every=1, act="print(sum(range(100)))", ends=(Status.OK,)),
)
TOLERANCES = {"threads": 4, "resident MiB": 6}
"""How much more may be held; nothing more of anything else. The loop's threads are started when they are needed."""


async def soak(backend: Backend, num_executions: int) -> int:
    """Run, print the table, and return the exit status: 1 when something is left behind."""
    await run(backend, max(200, num_executions // 10))  # to warm up
    before = held()
    start_s = time.monotonic()
    await run(backend, num_executions)
    print(f"{backend}: {num_executions / (time.monotonic() - start_s):.0f} executions a second\n")
    for _ in range(PATIENCE_S):
        if leaks(before, held()):
            await asyncio.sleep(1.0)
    left = leaks(before, after := held())
    print("| | before | after |\n|---|---|---|")
    for name in before:
        print(f"| {name} | {before[name]} | {after[name]} |{' **leaked** |' if name in left else ''}")
    return 1 if left else 0


async def run(backend: Backend, num_executions: int) -> None:
    """Run programs of all kinds in a pool of their own; AssertionError if one ends otherwise than it should."""
    async with open_pool(backend=backend, wall_s=30.0) as pool:
        has_disk = pool.capabilities().isolation.covers(Isolation.NAMESPACES)
        spec = SandboxSpec(limits=Limits(disk_bytes=8 * MIB)) if has_disk else SandboxSpec()
        kinds = [kind for kind in KINDS if has_disk or kind.act != FILL]
        for first in range(0, num_executions, EXECUTIONS_A_SANDBOX):
            async with pool.acquire(spec) as box:
                for number in range(first, min(first + EXECUTIONS_A_SANDBOX, num_executions)):
                    await run_one(box, next(kind for kind in kinds if number % kind.every == 0))


async def run_one(box: Sandbox, kind: Kind) -> None:
    if isinstance(kind.act, str):
        result = await box.exec_python(kind.act, limits=kind.limits)
    else:
        result = await box.exec(kind.act, stdin=bytes(100_000), limits=kind.limits)
    assert result.status in kind.ends, (kind, result)
    if kind.act == FILL:
        await box.exec(["sh", "-c", "find . -mindepth 1 -delete"])


def held() -> dict[str, int]:
    """Count what this process holds, and what it has in the system."""
    gc.collect()
    me = Path("/proc/self")
    groups = [path for home in hierarchies_here() for path in home.path.glob(f"{PREFIX}{own_tag()}*/**/")]
    filters = ["--filter", f"label={OWNER_LABEL}={own_tag()}"]
    containers = subprocess.run(["docker", "ps", "-aq", *filters], capture_output=True, check=False).stdout.split()
    return {
        "descriptors": len(os.listdir(me / "fd")),
        "threads": len(os.listdir(me / "task")),
        "resident MiB": int((me / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // MIB,
        "processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "control groups": len(groups),
        "containers": len(containers),
        "folders": len(list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{own_tag()}*"))),
    }


def leaks(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [name for name in before if after[name] > before[name] + TOLERANCES.get(name, 0)]
