"""Honest programs, in every backend.

1. Python source runs as `__main__` and prints; 2. stdin reaches it; 3. an uncaught exception is Python's own traceback
and exit code 1; 4. so is a syntax error; 5. SystemExit is its exit code, text goes to stderr; 6. threads and exit
handlers finish first; 7. each program is a process of its own: nothing stays; 8. it may import what was written beside
it; 9. an executable gets its arguments, stdin, environment and folder; 10. one that does not exist ends with 127, one
that cannot be run with 126; 11. the environment has PATH, HOME, TMPDIR and what the spec names; 12. output is bytes as
written; 13. a megabyte of honest output within the bound is whole; 14. time and memory are measured; 15. text that the
system cannot take is the program's failure; 16. a string for argv, bytes for source, a `cwd` outside and an empty argv
are refused; 17. the standard streams and the handler of Ctrl-C are those of a Python that has just started, be stdin a
file or a pipe; 18. programs take no descriptors of this process;
19. a signal tells of CPU time, of a file that is too long, or is the program's own; 20. `os._exit(0)` loses its output;
21. 200 programs at once need no thread each; 22. processes that make sessions and more processes are dead by the
deadline; 23. a signal before its start is a program's failure.
"""

import asyncio
import signal
import threading

import pytest

from sandboxes import Limits, Pool, Sandbox, SandboxSpec, Status
from sandboxes.conformance.harm import processes_left
from sandboxes.link import interpreter
from tests.sandboxes.conftest import BACKENDS, pool_of

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


async def test_python_runs_as_main(box: Sandbox) -> None:
    result = await box.exec_python("print(__name__, 6 * 7)")
    assert (result.status, result.exit_code, result.stdout) == (Status.OK, 0, b"__main__ 42\n")


async def test_stdin_reaches_the_program(box: Sandbox) -> None:
    result = await box.exec_python(
        "print(input()); import sys; print(len(sys.stdin.read()))", stdin=b"first\n" + b"x" * 200_000
    )
    assert result.stdout == b"first\n200000\n"


async def test_uncaught_exception_is_pythons_own_traceback(box: Sandbox) -> None:
    result = await box.exec_python("def half(x):\n    return x / nothing\n\nhalf(1)")
    assert (result.status, result.exit_code) == (Status.NONZERO, 1)
    assert result.stderr.decode() == (
        "Traceback (most recent call last):\n"
        '  File "<program>", line 4, in <module>\n'
        "    half(1)\n"
        '  File "<program>", line 2, in half\n'
        "    return x / nothing\n"
        "               ^^^^^^^\n"
        "NameError: name 'nothing' is not defined\n"
    )


async def test_syntax_error_is_pythons_own(box: Sandbox) -> None:
    result = await box.exec_python("print('before')\n1 +")
    lines = result.stderr.decode().splitlines()
    assert (result.exit_code, result.stdout) == (1, b"")
    assert (lines[0], lines[-1]) == ('  File "<program>", line 2', "SyntaxError: invalid syntax")


async def test_system_exit(box: Sandbox) -> None:
    for ending, code, stderr in (("exit()", 0, b""), ("quit(3)", 3, b""), ("exit('why')", 1, b"why\n")):
        result = await box.exec_python(ending)
        assert (result.exit_code, result.stderr) == (code, stderr), ending


async def test_threads_and_exit_handlers_finish(box: Sandbox) -> None:
    source = """
import atexit, threading
gate = threading.Event()
atexit.register(print, "handler")
threading.Thread(target=lambda: (gate.wait(), print("thread"))).start()
threading.Timer(0.01, gate.set).start()
print("main")
"""
    assert (await box.exec_python(source)).stdout == b"main\nthread\nhandler\n"


async def test_nothing_stays_from_one_program_to_the_next(box: Sandbox) -> None:
    await box.exec_python("import builtins, os, sys; builtins.left = 1; os.environ['LEFT'] = '1'; sys.left = 1")
    result = await box.exec_python(
        "import builtins, os, sys\nprint([hasattr(x, 'left') for x in (builtins, sys)], 'LEFT' in os.environ)"
    )
    assert result.stdout == b"[False, False] False\n"


async def test_imports_what_was_written_beside_it(box: Sandbox) -> None:
    await box.write("helper.py", b"def double(x): return 2 * x")
    assert (await box.exec_python("import helper; print(helper.double(21))")).stdout == b"42\n"


async def test_executable_gets_arguments_stdin_environment_and_folder(box: Sandbox) -> None:
    await box.write("inside/file.txt", b"x")
    script = 'echo "$1|$WHO|$(cat)|$(ls)"'
    result = await box.exec(["sh", "-c", script, "sh", "a b"], stdin=b"in", env={"WHO": "me"}, cwd="inside")
    assert (result.status, result.stdout) == (Status.OK, b"a b|me|in|file.txt\n")


async def test_what_cannot_be_run_ends_with_127_or_126(box: Sandbox) -> None:
    result = await box.exec(["no-such-program"])
    assert (result.status, result.exit_code) == (Status.NONZERO, 127)
    assert result.stderr == b"sandbox: cannot run 'no-such-program': No such file or directory\n"
    await box.write("data", b"not executable")
    assert (await box.exec(["./data"])).exit_code == 126


async def test_environment_is_empty_but_for_what_is_named(pool: Pool) -> None:
    async with pool.acquire(SandboxSpec(env={"MODE": "test"})) as box:
        python = await box.exec_python("import os; print(sorted(os.environ), os.environ['HOME'] == os.getcwd())")
        executable = await box.exec(["/usr/bin/env"])
    assert python.stdout == b"['HOME', 'MODE', 'PATH', 'TMPDIR'] True\n"
    names = {line.split(b"=")[0] for line in executable.stdout.splitlines()}
    assert names == {b"HOME", b"MODE", b"PATH", b"TMPDIR"}


async def test_output_is_bytes_as_written(box: Sandbox) -> None:
    data = bytes(range(256)) + b"\x1b[2J\x00\xc3"
    result = await box.exec_python(
        f"import sys; sys.stdout.buffer.write({data!r}); sys.stderr.buffer.write({data[::-1]!r})"
    )
    assert (result.stdout, result.stderr) == (data, data[::-1])


async def test_a_megabyte_within_the_bound_is_whole(box: Sandbox) -> None:
    result = await box.exec_python("print('x' * (2**20 - 1))", limits=Limits(output_bytes=2**20))
    assert (result.status, len(result.stdout), result.truncated) == (Status.OK, 2**20, False)


async def test_time_and_memory_are_measured(box: Sandbox) -> None:
    result = await box.exec_python("x = bytearray(50_000_000)\nimport time\nwhile time.process_time() < 0.05: pass")
    assert result.cpu_s >= 0.05
    assert result.wall_s > 0
    assert 50_000_000 <= result.peak_memory_bytes < 120_000_000


@pytest.mark.parametrize(
    ("source", "limits", "status", "number"),
    [
        ("while True: pass", {"cpu_s": 0.5}, Status.TIMEOUT, signal.SIGKILL),
        ("while True: file.write(bytes(2**16))", {"file_bytes": 2**20}, Status.DISK, signal.SIGXFSZ),
        ("import os; os.kill(os.getpid(), 11)", {}, Status.SIGNALED, signal.SIGSEGV),
    ],
)
async def test_a_signal_tells_how_it_ended(
    box: Sandbox, source: str, limits: dict[str, float], status: Status, number: signal.Signals
) -> None:
    result = await box.exec_python(f"file = open('big', 'wb')\n{source}", limits=Limits(**{"wall_s": 20.0, **limits}))
    assert (result.status, result.exit_code, result.signal) == (status, None, number)


async def test_early_exit_loses_its_output(box: Sandbox) -> None:
    result = await box.exec_python("print('42')\nimport os\nos._exit(0)")
    assert (result.status, result.stdout) == (Status.OK, b"")


async def test_200_programs_at_once_without_a_thread_each(backend: str) -> None:
    async with pool_of(backend, max_concurrent=200) as pool, pool.acquire() as box:
        await box.exec_python("")
        num_threads = threading.active_count()
        results = await asyncio.gather(*(box.exec_python(f"print({number})") for number in range(200)))
        assert threading.active_count() <= num_threads
    assert [result.stdout for result in results] == [b"%d\n" % number for number in range(200)]


@pytest.mark.parametrize("text", ["\ud800", "a\0b"])
async def test_text_that_the_system_cannot_take_fails_the_program(box: Sandbox, text: str) -> None:
    assert (await box.exec_python(f"print(1) # {text}")).status is Status.NONZERO
    assert (await box.exec([text])).exit_code == 126


async def test_what_cannot_be_a_program_is_refused(box: Sandbox) -> None:
    for argv in ("ls", []):
        with pytest.raises(ValueError, match="give the program and its arguments as a list"):
            await box.exec(argv)
    with pytest.raises(ValueError, match="give Python source as text"):
        await box.exec_python(b"pass")  # pyright: ignore[reportArgumentType]
    for cwd in ("..", "/", "a/../.."):
        with pytest.raises(PermissionError, match="relative and without"):
            await box.exec(["true"], cwd=cwd)


STREAMS = """
import signal, sys
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.fileno(), stream.isatty(), stream.seekable(), stream.encoding, stream.errors, stream.line_buffering)
print(signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGCHLD))
"""


async def test_streams_are_those_of_a_python_that_has_just_started(backend: str, box: Sandbox) -> None:
    bare = ["python3" if backend == "docker" else interpreter(), "-I", "-S", "-X", "utf8", "-c", STREAMS]
    started = await box.exec(bare, stdin=b"a file")
    assert started.is_ok, started
    assert (await box.exec_python(STREAMS, stdin=b"a file")).stdout == started.stdout
    talking, expected = await box.spawn_python(STREAMS), await box.spawn(bare)
    said = [chunk async for chunk in talking.stdout]
    assert b"".join(said) == b"".join([chunk async for chunk in expected.stdout])
    assert (await talking.wait()).is_ok


async def test_a_program_takes_no_descriptors_of_the_host(box: Sandbox, descriptors_left) -> None:
    await box.exec(["true"])
    with descriptors_left(0):
        assert (await box.exec(["cat"], stdin=b"in")).stdout == b"in"
        assert (await (await box.spawn(["true"])).wait()).is_ok


SIGNALLER = """
import os, signal
print("ready", flush=True)
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try: os.kill(int(name), signal.SIGINT)
            except OSError: pass
"""


async def test_a_signal_before_the_start_is_the_programs_failure(backend: str, box: Sandbox) -> None:
    if backend == "subprocess":
        pytest.skip("without walls it would signal others")
    storm = await box.spawn_python(SIGNALLER)
    assert await anext(storm.stdout) == b"ready\n"
    for _ in range(30):
        for result in (await box.exec(["true"]), await box.exec_python("pass")):
            assert result.status in (Status.OK, Status.NONZERO, Status.SIGNALED)
    await storm.kill()


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


async def test_storms_of_sessions_are_dead_by_the_deadline(backend: str, box: Sandbox) -> None:
    if backend == "subprocess":
        pytest.skip("nothing bounds the processes of a program without walls")
    results = await asyncio.gather(*(box.exec_python(STORM, limits=Limits(wall_s=1.0)) for _ in range(2)))
    assert {result.status for result in results} <= {Status.PIDS, Status.TIMEOUT}
    assert await processes_left(box) == ""
