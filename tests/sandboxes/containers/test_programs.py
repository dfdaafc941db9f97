"""Programs in a container, by its agent.

Results: 1. output, exit code and usage; 2. a signal; 3. stdin, of any length, and unread; 4. environment and working
directory; 5. what cannot be run; 6. Python source in a warm interpreter, which is nobody's copy; 7. many at once.
Limits: 8. wall-clock time, and that of a deaf program; 9. CPU time; 10. output, on either stream, of which the first
bytes are kept; 11. memory and processes as the call asks; others within other bounds refuse it, and so do limits of a
whole sandbox; 12. a cancelled call's program is killed. Streaming: 13. talking to a program; 14. output that nobody
reads stays there; 15. kill, and a deadline; 16. stdin that nobody reads; 17. its end is told any number of times.
What is left: 18. daemons die with their program, also while others run; 19. storms of sessions at once are dead by the
deadline, and the container lives. Source: 20. a NUL byte or half a character in it is the program's failure.
"""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from sandboxes.base import Program
from sandboxes.containers.agent_link import CHUNK_BYTES
from sandboxes.containers.cell import AgentCell
from sandboxes.spec import ExecResult, Limits, Status

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = Limits(wall_s=30.0)
PATIENCE_S = 60.0


async def run(cell: AgentCell, *argv: str, stdin: bytes = b"", limits: Limits = PATIENT) -> ExecResult:
    return await cell.exec(Program(argv=argv), stdin=stdin, limits=limits)


async def run_python(cell: AgentCell, source: str, *, stdin: bytes = b"", limits: Limits = PATIENT) -> ExecResult:
    return await cell.exec(Program(source=source), stdin=stdin, limits=limits)


async def processes(cell: AgentCell) -> list[str]:
    """The programs' own, but for the one that looks."""
    look = "import os\nprint(*[p for p in os.listdir('/proc') if p.isdigit() and os.stat(f'/proc/{p}').st_uid])"
    return (await run_python(cell, look)).stdout.split()[1:]


async def test_output_exit_code_and_usage(cell: AgentCell) -> None:
    result = await run(cell, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (Status.NONZERO, 3, b"out\n", b"err\n")
    assert result.peak_memory_bytes > 0
    assert not result.truncated


async def test_signal(cell: AgentCell) -> None:
    result = await run(cell, "sh", "-c", "kill -SEGV $$")
    assert (result.status, result.exit_code, result.signal) == (Status.SIGNALED, None, signal.SIGSEGV)


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES, CHUNK_BYTES + 1, 2**20])
async def test_stdin_of_any_length(cell: AgentCell, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    result = await run(cell, "cat", stdin=data, limits=replace(PATIENT, output_bytes=2**20))
    assert result.stdout == data


async def test_stdin_that_is_not_read(cell: AgentCell) -> None:
    assert (await run(cell, "true", stdin=bytes(2**20))).is_ok


async def test_environment_and_working_directory(cell: AgentCell) -> None:
    await cell.write("folder/file", b"")
    program = Program(argv=("sh", "-c", "pwd; echo $ONE; env | cut -d= -f1 | sort"), env={"ONE": "1"}, cwd="folder")
    result = await cell.exec(program, stdin=b"", limits=PATIENT)
    assert result.stdout.split() == [b"/work/folder", b"1", b"HOME", b"ONE", b"PATH", b"PWD", b"TMPDIR"]


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
async def test_what_cannot_be_run(cell: AgentCell, name: str, code: int) -> None:
    result = await run(cell, name)
    assert (result.status, result.exit_code) == (Status.NONZERO, code)
    assert name.encode() in result.stderr


async def test_python_runs_in_a_warm_interpreter_that_is_nobodys_copy(cell: AgentCell) -> None:
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


async def test_many_at_once(cell: AgentCell) -> None:
    results = await asyncio.gather(*(run(cell, "echo", str(number)) for number in range(20)))
    assert [int(result.stdout) for result in results] == list(range(20))


@pytest.mark.parametrize("source", ["while True: pass", "import signal, time\nsignal.signal(15, 1)\ntime.sleep(99)"])
async def test_wall_clock_time(cell: AgentCell, source: str) -> None:
    result = await run_python(cell, source, limits=Limits(wall_s=0.3, cpu_s=30.0))
    assert (result.status, result.signal) == (Status.TIMEOUT, signal.SIGKILL)
    assert result.wall_s >= 0.3


async def test_cpu_time(cell: AgentCell) -> None:
    result = await run_python(cell, "while True: pass", limits=replace(PATIENT, cpu_s=1.0))
    assert (result.status, result.signal) == (Status.TIMEOUT, signal.SIGXCPU)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_has_a_bound(cell: AgentCell, stream: str) -> None:
    source = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
    result = await run_python(cell, source, limits=replace(PATIENT, output_bytes=10_000))
    assert (result.status, result.truncated, getattr(result, stream)) == (Status.OUTPUT_LIMIT, True, b"x" * 10_000)


async def test_output_of_just_the_bound_is_no_more_than_it(cell: AgentCell) -> None:
    result = await run_python(cell, "print('x' * 9_999)", limits=replace(PATIENT, output_bytes=10_000))
    assert (result.status, result.truncated, len(result.stdout)) == (Status.OK, False, 10_000)


async def test_memory_is_what_the_call_asks(cell: AgentCell) -> None:
    source = "held = b'x' * 150_000_000"
    small = await run_python(cell, source, limits=replace(PATIENT, memory_bytes=64 * 2**20))
    assert (small.status, small.oom_kills) == (Status.MEMORY, 1)
    assert (await run_python(cell, source)).is_ok


async def test_bounds_are_one_for_all_that_run(cell: AgentCell) -> None:
    waiting = await cell.spawn(Program(argv=("cat",)), limits=PATIENT, is_timed=False)
    with pytest.raises(ValueError, match=r"SandboxSpec\.limits"):
        await run(cell, "true", limits=replace(PATIENT, pids=9))
    await waiting.kill()
    assert (await run(cell, "true", limits=replace(PATIENT, pids=9))).is_ok


@pytest.mark.parametrize("name", ["disk_bytes", "inodes"])
async def test_limits_of_a_sandbox_are_not_taken_for_one_program(cell: AgentCell, name: str) -> None:
    with pytest.raises(ValueError, match=rf"Limits\.{name} holds for a whole sandbox"):
        await run(cell, "true", limits=replace(PATIENT, **{name: 1_000_000}))


async def test_cancelled_call_kills_its_program(cell: AgentCell) -> None:
    call = asyncio.create_task(run(cell, "sh", "-c", "echo > started; sleep 1000"))
    async with asyncio.timeout(PATIENCE_S):
        while not (await run(cell, "test", "-e", "started")).is_ok:
            pass
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while await processes(cell):
            pass


async def test_talking_to_a_program(cell: AgentCell) -> None:
    program = Program(source="while True: print(input().upper(), flush=True)")
    process = await cell.spawn(program, limits=PATIENT, is_timed=False)
    async with asyncio.timeout(PATIENCE_S):
        for word in ("one", "two"):
            await process.write(f"{word}\n".encode())
            assert await anext(process.stdout) == f"{word.upper()}\n".encode()
        await process.close_stdin()
        assert b"".join([chunk async for chunk in process.stderr]).endswith(b"EOFError: EOF when reading a line\n")
        assert [chunk async for chunk in process.stdout] == []
        first, second = await asyncio.gather(process.wait(), process.wait())
    assert (first.status, first.exit_code, first) == (Status.NONZERO, 1, second)


async def test_output_that_nobody_reads_stays_there(cell: AgentCell) -> None:
    source = "import os, sys\nfor _ in range(64): os.write(1, bytes(2**16))\nopen('through', 'w')"
    process = await cell.spawn(Program(source=source), limits=PATIENT, is_timed=False)
    async with asyncio.timeout(PATIENCE_S):
        first = await anext(process.stdout)
        with pytest.raises(FileNotFoundError):
            await cell.read("through")
        rest = [chunk async for chunk in process.stdout]
        assert len(first) + sum(len(chunk) for chunk in rest) == 2**22
        assert (await process.wait()).is_ok


async def test_killed_program(cell: AgentCell) -> None:
    process = await cell.spawn(Program(argv=("sleep", "1000")), limits=PATIENT, is_timed=False)
    await process.kill()
    await process.kill()
    assert (await process.wait()).signal == signal.SIGKILL


async def test_deadline_of_a_streaming_program(cell: AgentCell) -> None:
    process = await cell.spawn(Program(argv=("sleep", "1000")), limits=replace(PATIENT, wall_s=0.2), is_timed=True)
    async with asyncio.timeout(PATIENCE_S):
        assert (await process.wait()).status is Status.TIMEOUT


async def test_stdin_that_nobody_will_read(cell: AgentCell) -> None:
    process = await cell.spawn(Program(source="import os\nos.close(0)\ninput"), limits=PATIENT, is_timed=False)
    async with asyncio.timeout(PATIENCE_S):
        await process.wait()
        with pytest.raises(BrokenPipeError):
            await process.write(b"x")


async def test_daemons_die_with_their_program(cell: AgentCell) -> None:
    daemon = "setsid sh -c 'setsid sleep 1000 & sleep 1000' & echo gone"
    assert (await run(cell, "sh", "-c", daemon)).stdout == b"gone\n"
    assert await processes(cell) == []


async def test_daemons_die_while_others_run(cell: AgentCell) -> None:
    other = await cell.spawn(Program(argv=("cat",)), limits=PATIENT, is_timed=False)
    assert (await run(cell, "sh", "-c", "setsid sleep 1000 & exit 0")).is_ok
    assert len(await processes(cell)) == 1
    await other.kill()


STORM = """
import os, threading
def storm():
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                storm()
        except OSError: pass
for _ in range(4): threading.Thread(target=storm).start()
"""


async def test_storms_of_sessions_are_dead_by_the_deadline(cell: AgentCell) -> None:
    results = await asyncio.gather(*(run_python(cell, STORM, limits=Limits(wall_s=1.0)) for _ in range(2)))
    assert {result.status for result in results} <= {Status.PIDS, Status.TIMEOUT}
    assert await processes(cell) == []


@pytest.mark.parametrize("source", ["print(1)\0", "print(1)  # \ud800"])
async def test_source_that_no_file_could_hold(cell: AgentCell, source: str) -> None:
    result = await run_python(cell, source)
    assert (result.status, result.stdout) == (Status.NONZERO, b"")
