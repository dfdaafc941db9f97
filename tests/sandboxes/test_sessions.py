"""Programs that are talked with, and sessions that keep their state, in every backend.

Spawned: 1. what is written to a program's stdin comes back while it runs; 2. its end is told without its output;
3. more than a pipe holds is read whole, on both streams; 4. `kill` ends it and what came of it; 5. its sandbox's end is
its own; 6. writing to one that is dead is a BrokenPipeError; 7. limits that are given hold.
Shell: 8. variables, functions, options and the folder are kept; 9. the status is the kernel's, and a failure, an exit
or a syntax error loses nothing; 10. a run that is killed leaves the state of the run before.
Python: 11. names are kept, an exception is its own traceback and loses nothing; 12. an interrupted run loses nothing;
13. one that takes no interruption loses the state, and says so; 14. so does one that dies, whose status is the
kernel's; 15. output is bounded; 16. limits of the session are not taken for a run; 17. cancelling a run ends it;
18. a child that a run forks does not take part in the next; 19. with its sandbox a session is closed. (What runs print
and write to descriptors is row 25 of the hostile suite.)
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from areal_agent.errors import SandboxError
from sandboxes import Limits, Pool, Sandbox, Status
from tests.sandboxes.conftest import BACKENDS

SET_UP = """
text='a  b'; list=(1 '2 3'); declare -A map=([k]=v); export E=e
f() { echo "f $1"; }
mkdir d; cd d; umask 027; set -f
"""
ENDINGS = (("x=2; echo '$?=0'; exit 7", 7), ("x=3; false", 1), ("set -e; x=5; false; x=6", 1))
ECHO = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)\nexit(4)"


pytestmark = pytest.mark.parametrize("backend", BACKENDS)


async def test_spawned_program_answers_while_it_runs(box: Sandbox) -> None:
    process = await box.spawn_python(ECHO)
    for word in (b"one\n", b"two\n"):
        await process.write(word)
        assert await anext(process.stdout) == b"got " + word
    await process.close_stdin()
    result = await process.wait()
    assert (result.status, result.exit_code, result.stdout) == (Status.NONZERO, 4, b"")
    assert await process.wait() == result


async def test_spawned_program_prints_more_than_a_pipe_holds(box: Sandbox) -> None:
    process = await box.spawn(["sh", "-c", "head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2"])

    async def length_of(stream: AsyncIterator[bytes]) -> int:
        return sum([len(chunk) async for chunk in stream])

    assert await asyncio.gather(length_of(process.stdout), length_of(process.stderr)) == [300_000, 300_000]
    assert (await process.wait()).is_ok


async def test_killed_program_is_dead_with_all_that_came_of_it(box: Sandbox) -> None:
    process = await box.spawn(["sh", "-c", "sleep 1000 & echo here; wait"])
    assert await anext(process.stdout) == b"here\n"
    await process.kill()
    assert await anext(process.stdout, b"the end") == b"the end"
    assert (await process.wait()).signal == signal.SIGKILL


async def test_spawned_program_ends_with_its_sandbox(pool: Pool) -> None:
    async with pool.acquire() as box:
        process = await box.spawn(["sleep", "1000"])
    if pool.capabilities().backend == "subprocess":
        assert (await process.wait()).signal == signal.SIGKILL
    else:  # its sandbox is gone before anybody is told of its programs
        with pytest.raises(SandboxError, match="closed"):
            await process.wait()


async def test_writing_to_a_dead_program(box: Sandbox) -> None:
    process = await box.spawn(["true"])
    await process.wait()
    with pytest.raises(BrokenPipeError):
        await process.write(b"x")


async def test_limits_of_a_spawned_program_hold_when_they_are_given(box: Sandbox) -> None:
    process = await box.spawn(["sleep", "1000"], limits=Limits(wall_s=0.1))
    assert (await process.wait()).status is Status.TIMEOUT


async def test_shell_keeps_its_state(box: Sandbox) -> None:
    shell = box.shell()
    assert (await shell.run(SET_UP)).is_ok
    result = await shell.run('echo "$text|${list[1]}|${map[k]}|$(printenv E)|$(f x)|${PWD##*/}|$(umask)|$-" *')
    text, *rest = result.stdout.decode().strip().split("|")
    assert (text, rest[:6]) == ("a  b", ["2 3", "v", "e", "f x", "d", "0027"])
    assert "f" in rest[6].split()[0]
    assert rest[6].endswith("*")


async def test_shell_has_the_kernels_status_and_goes_on(box: Sandbox) -> None:
    shell = box.shell()
    await shell.run("x=1")
    for command, code in ENDINGS:
        result = await shell.run(command)
        assert (result.status, result.exit_code) == (Status.NONZERO, code)
    assert (await shell.run("x=4 (((")).status is Status.NONZERO
    assert (await shell.run("echo $x")).stdout == b"5\n"


async def test_killed_run_of_a_shell_leaves_the_state_before(box: Sandbox) -> None:
    shell = box.shell()
    await shell.run("x=1; cd /")
    assert (await shell.run("x=2; sleep 1000", limits=Limits(wall_s=0.3))).status is Status.TIMEOUT
    assert (await shell.run("x=3; kill -9 $$")).status is Status.SIGNALED
    assert (await shell.run("echo $x; pwd; cat", stdin=b"in")).stdout == b"1\n/\nin"


async def test_python_keeps_its_names(box: Sandbox) -> None:
    async with box.python() as python:
        await python.run("x = 1\ndef next_x():\n    global x\n    x += 1\n    return x")
        assert (await python.run("print(next_x(), next_x())")).stdout == b"2 3\n"
        failed = await python.run("x = 9\nnothing")
        assert (failed.status, failed.exit_code, failed.is_state_lost) == (Status.NONZERO, 1, False)
        assert failed.stderr.decode().startswith('Traceback (most recent call last):\n  File "<run 3>", line 2')
        assert (await python.run("exit(3)")).exit_code == 3
        assert (await python.run("import sys; print(x, file=sys.stderr)")).stderr == b"9\n"


async def test_interrupted_run_of_python_loses_nothing(box: Sandbox) -> None:
    async with box.python() as python:
        await python.run("x = 1")
        result = await python.run("import os; os.system('sleep 1000')", limits=Limits(wall_s=0.2))
        after = await python.run("print(x)")
    assert result.status is Status.TIMEOUT
    assert (after.stdout == b"1\n") is not result.is_state_lost  # a slow machine may be out of patience


async def test_deaf_run_of_python_loses_the_state(box: Sandbox) -> None:
    async with box.python() as python:
        await python.run("x = 1")
        deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        result = await python.run(deaf, limits=Limits(wall_s=0.2))
        assert (result.status, result.is_state_lost) == (Status.TIMEOUT, True)
        assert b"NameError" in (await python.run("print(x)")).stderr


async def test_dead_python_has_the_kernels_status(box: Sandbox) -> None:
    async with box.python() as python:
        for ending, status in (("os._exit(3)", Status.NONZERO), ("os.kill(os.getpid(), 11)", Status.SIGNALED)):
            result = await python.run(f"import os; print('said', flush=True); {ending}")
            assert (result.status, result.stdout, result.is_state_lost) == (status, b"said\n", True)
        assert (await python.run("print(1)")).stdout == b"1\n"


async def test_python_that_gave_up_its_streams_is_ended(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.sessions.END_PATIENCE_S", 0.2)
    async with box.python() as python:
        result = await python.run("import os; os.closerange(3, 300); null = os.open('/dev/null', 1)\nos.dup2(null, 1)")
        assert result.is_state_lost
        with pytest.raises(ValueError, match="give Python source as text"):
            await python.run(b"1")
        assert (await python.run("print('\\ud800'.encode('utf-8', 'surrogatepass'), '\ud800')")).is_ok is False
        assert (await python.run("print(1)")).stdout == b"1\n"


async def test_output_of_python_is_bounded(box: Sandbox) -> None:
    async with box.python() as python:
        result = await python.run("while True: print('x' * 1000)", limits=Limits(output_bytes=5_000))
        assert (result.status, len(result.stdout), result.truncated) == (Status.OUTPUT_LIMIT, 5_000, True)
        assert (await python.run("print(1)")).stdout == b"1\n"


async def test_limits_of_a_session_are_not_taken_for_a_run(box: Sandbox) -> None:
    async with box.python() as python:
        with pytest.raises(ValueError, match="give the rest to `python"):
            await python.run("", limits=Limits(memory_bytes=1))


async def test_cancelling_a_run_of_python_ends_it(box: Sandbox) -> None:
    async with box.python() as python:
        call = asyncio.create_task(python.run("open('gate', 'w').close(); import time; time.sleep(1000)"))
        while not call.done():
            with contextlib.suppress(FileNotFoundError):
                await box.read("gate")
                break
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await python.run("print(1)")).stdout == b"1\n"


async def test_forked_child_is_not_the_session(box: Sandbox) -> None:
    async with box.python() as python:
        await python.run("import os\nx = os.fork()")
        for number in range(3):
            assert (await python.run(f"print({number}, x > 0)")).stdout == b"%d True\n" % number


async def test_session_is_closed_with_its_sandbox(pool: Pool) -> None:
    async with pool.acquire() as box:
        python, shell = box.python(), box.shell()
        await python.run("x = 1")
    with pytest.raises(SandboxError, match="closed"):
        await python.run("print(x)")
    with pytest.raises(SandboxError, match="closed"):
        await shell.run("echo")
