"""Programs in a container, by its agent, beyond what the tests of every backend show.

1. stdin of any length, and unread; 2. Python source in a warm interpreter, which is nobody's copy; 3. memory as the
call asks; 4. output that nobody reads stays there; 5. daemons die with their program while others run; 6. writing to a
full disk is the host's to hear.
"""

import asyncio
import os
from dataclasses import replace

import pytest

from sandboxes.cell import ContainerCell
from sandboxes.link import CHUNK_BYTES
from sandboxes.spec import ExecResult, Limits, Program, Status

PATIENT = Limits(wall_s=30.0)
PATIENCE_S = 60.0


async def run(cell: ContainerCell, *argv: str, stdin: bytes = b"", limits: Limits = PATIENT) -> ExecResult:
    return await cell.exec(Program(argv=argv), stdin=stdin, limits=limits)


async def run_python(cell: ContainerCell, source: str, *, stdin: bytes = b"", limits: Limits = PATIENT) -> ExecResult:
    return await cell.exec(Program(source=source), stdin=stdin, limits=limits)


async def processes(cell: ContainerCell) -> list[str]:
    """The programs' own, but for the one that looks."""
    look = "import os\nprint(*[p for p in os.listdir('/proc') if p.isdigit() and os.stat(f'/proc/{p}').st_uid])"
    return (await run_python(cell, look)).stdout.split()[1:]


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES, CHUNK_BYTES + 1, 2**20])
async def test_stdin_of_any_length(cell: ContainerCell, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    result = await run(cell, "cat", stdin=data, limits=replace(PATIENT, output_bytes=2**20))
    assert result.stdout == data


async def test_stdin_that_is_not_read(cell: ContainerCell) -> None:
    assert (await run(cell, "true", stdin=bytes(2**20))).is_ok


async def test_bound_on_cpus_may_be_the_machines_and_is_undone(cell: ContainerCell) -> None:
    show = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max 2> /dev/null; true"
    shown = [(await run(cell, "sh", "-c", show, limits=replace(PATIENT, cpus=cpus))).stdout for cpus in (100.0, None)]
    assert shown[0].startswith(b"10000000") and shown[1].startswith((b"-1", b"max"))


async def test_python_runs_in_a_warm_interpreter_that_is_nobodys_copy(cell: ContainerCell) -> None:
    await run_python(cell, "held = 'needle'", stdin=b"needle-in-stdin")
    source = r"""
import re
for line in open("/proc/self/maps"):
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    try:
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(start)
            if re.search(b"needle[-]in-stdin", memory.read(end - start)): print("found")
    except (OSError, ValueError): pass
print(__name__, "sandboxes" in __import__("sys").modules, open("/dev/stdin").read())
"""
    assert (await run_python(cell, source, stdin=b"mine")).stdout == b"__main__ False mine\n"


async def test_memory_is_what_the_call_asks(cell: ContainerCell) -> None:
    source = "held = b'x' * 150_000_000"
    small = await run_python(cell, source, limits=replace(PATIENT, memory_bytes=64 * 2**20))
    assert (small.status, small.oom_kills) == (Status.MEMORY, 1)
    assert (await run_python(cell, source)).is_ok


async def test_output_that_nobody_reads_stays_there(cell: ContainerCell) -> None:
    source = "import os, sys\nfor _ in range(64): os.write(1, bytes(2**16))\nopen('through', 'w')"
    process = await cell.spawn(Program(source=source), limits=PATIENT, is_timed=False)
    async with asyncio.timeout(PATIENCE_S):
        first = await anext(process.stdout)
        with pytest.raises(FileNotFoundError):
            await cell.read("through")
        rest = [chunk async for chunk in process.stdout]
        assert len(first) + sum(len(chunk) for chunk in rest) == 2**22
        assert (await process.wait()).is_ok


async def test_daemons_die_while_others_run(cell: ContainerCell) -> None:
    other = await cell.spawn(Program(argv=("cat",)), limits=PATIENT, is_timed=False)
    assert (await run(cell, "sh", "-c", "setsid sleep 1000 & exit 0")).is_ok
    assert len(await processes(cell)) == 1
    await other.kill()


async def test_full_disk(cell: ContainerCell) -> None:
    with pytest.raises(OSError, match="No space left"):
        await cell.write("too-much", bytes(13 * 2**20))
    await run(cell, "rm", "too-much")
