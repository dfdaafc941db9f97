"""Programs that mean harm, and what must come of each (of the suite that every backend answers for).

Limits: 1. endless output, on either stream; 2. a busy loop that ignores signals; 3. CPU time; 4. a memory bomb; 5. one
huge allocation; 6. a file that never ends; 7. open files. Escapes: 8. a double-forked daemon that holds stdout; 9. a
daemon of a program that runs on; 10. children left in the group; 11. closing every descriptor; 12. writing to every
descriptor; 13. `kill(-1)`, and signals to the launcher and the host; 14. the host's environment; 15. another process's
environment and memory; 16. changing files outside its folder, which inside is free; 17. capabilities; 18. what other
programs hold, searched in its own memory. Verdicts: 19. `os._exit(0)` loses its output; 20. a signal of its own;
21. faked statuses; 22. a Python broken from inside; 23. a working directory
that is locked.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from sandboxes import Limits, Pool, Sandbox, Status, open_pool

STILL_WORKS = "print('still works')"


def requires(pool: Pool, promise: str) -> None:
    """Skip where the kernel cannot give what the test is about; `capabilities` must then say so."""
    if f"no {promise}" not in pool.capabilities().enforces:
        assert promise in pool.capabilities().cannot_stop
        pytest.skip(f"this kernel cannot stop {promise}")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_endless_output(box: Sandbox, stream: str) -> None:
    source = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
    result = await box.exec_python(source, limits=Limits(wall_s=20, output_bytes=10_000))
    assert (result.status, result.truncated) == (Status.OUTPUT_LIMIT, True)
    assert getattr(result, stream) == b"x" * 10_000


async def test_busy_loop_that_ignores_signals(box: Sandbox) -> None:
    source = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("deaf", flush=True)
while True: pass
"""
    result = await box.exec_python(source, limits=Limits(wall_s=0.5))
    assert (result.status, result.signal, result.stdout) == (Status.TIMEOUT, signal.SIGKILL, b"deaf\n")


async def test_cpu_time(box: Sandbox) -> None:
    result = await box.exec_python("while True: pass", limits=Limits(wall_s=20, cpu_s=0.5))
    assert (result.status, result.signal) == (Status.TIMEOUT, signal.SIGXCPU)


async def test_memory_bomb(box: Sandbox) -> None:
    source = "hoard = []\nwhile True: hoard.append(bytearray(2**20))"
    result = await box.exec_python(source, limits=Limits(memory_bytes=100 * 2**20))
    assert result.status is Status.MEMORY
    assert result.peak_memory_bytes <= 100 * 2**20


async def test_one_huge_allocation(box: Sandbox) -> None:
    result = await box.exec_python("bytearray(2**40)")
    assert result.status is Status.MEMORY
    assert result.stderr.endswith(b"MemoryError\n")


async def test_file_that_never_ends(box: Sandbox) -> None:
    source = "file = open('big', 'wb')\nwhile True: file.write(bytes(2**16))"
    result = await box.exec_python(source, limits=Limits(file_bytes=2**20))
    assert (result.status, result.signal) == (Status.DISK, signal.SIGXFSZ)


async def test_open_files(box: Sandbox) -> None:
    source = "import os\nfiles = []\nwhile True: files.append(os.open('/dev/null', os.O_RDONLY))"
    result = await box.exec_python(source, limits=Limits(open_files=32))
    assert b"Too many open files" in result.stderr
    assert (await box.exec_python(STILL_WORKS)).status is Status.OK


async def test_double_forked_daemon_that_holds_stdout(box: Sandbox, witness) -> None:
    source = f"""
import os
if os.fork():
    os.wait()
    print("parent is done")
else:
    os.setsid()
    {"".join(f"{line};" for line in witness.connect().splitlines())}
    if os.fork():
        os._exit(0)
    witness.recv(9)
"""
    result = await box.exec_python(source)
    assert (result.status, result.stdout) == (Status.OK, b"parent is done\n")
    await (await witness.arrival()).death()


async def test_daemon_dies_although_its_program_runs_on(box: Sandbox, witness) -> None:
    source = f"""
import os
{witness.connect()}
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 3)
        witness.recv(9)
    os._exit(0)
os.wait()
"""
    assert (await box.exec_python(source)).status is Status.OK
    await (await witness.arrival()).death()


async def test_children_left_in_the_group(box: Sandbox, witness) -> None:
    source = f"""
import os
{witness.connect()}
for _ in range(20):
    if os.fork() == 0:
        witness.recv(9)
"""
    assert (await box.exec_python(source)).status is Status.OK
    await (await witness.arrival()).death()


async def test_closing_every_descriptor(box: Sandbox) -> None:
    result = await box.exec_python("print('hi', flush=True)\nimport os\nos.closerange(0, 65536)")
    assert (result.status, result.stdout) == (Status.OK, b"hi\n")
    assert (await box.exec_python(STILL_WORKS)).status is Status.OK


async def test_writing_to_every_descriptor() -> None:
    source = """
import os
written = []
for descriptor in range(3, 1000):
    try:
        written.append(os.write(descriptor, bytes(29)))
    except OSError:
        pass
print(written)
exit(5)
"""
    with contextlib.ExitStack() as stack:
        for _ in range(300):  # so that what the host hands to its launcher has high numbers
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        async with open_pool(backend="subprocess") as pool, pool.acquire() as box:
            result = await box.exec_python(source)
    assert (result.status, result.exit_code, result.stdout) == (Status.NONZERO, 5, b"[]\n")


async def test_signals_stay_inside(pool: Pool, box: Sandbox) -> None:
    requires(pool, "sending signals to your other processes")
    # kill(-1) is tried only once the launcher is known to be out of reach.
    source = f"""
import os
for pid in (os.getppid(), {os.getpid()}, 1):
    try:
        os.kill(pid, 0)
    except PermissionError:
        continue
    exit(f"{{pid}} is within reach")
os.kill(-1, 9)
print("nobody else died")
"""
    result = await box.exec_python(source)
    assert (result.stdout, result.stderr) == (b"nobody else died\n", b"")
    assert (await box.exec_python(STILL_WORKS)).status is Status.OK


async def test_host_environment_is_absent(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_TOKEN", "secret")
    python = await box.exec_python("import os; print(os.environ)")
    launcher = await box.exec_python("print(open('/proc/self/environ').read())")  # the child of a fork has its parent's
    assert b"HOST_TOKEN" not in python.stdout + launcher.stdout


@pytest.mark.parametrize("file", ["environ", "mem", "maps", "fd/0"])
async def test_other_processes_are_closed_books(pool: Pool, box: Sandbox, file: str) -> None:
    requires(pool, "reading the memory and environment of your other processes")
    for pid in ("os.getppid()", str(os.getpid())):
        result = await box.exec_python(f"import os; open(f'/proc/{{{pid}}}/{file}', 'rb').read(9)")
        assert b"PermissionError" in result.stderr


async def test_writing_outside_its_folder(pool: Pool, box: Sandbox, tmp_path: Path) -> None:
    requires(pool, "changing files outside the working directory")
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for act in (f"open({str(victim)!r}, 'w')", f"os.unlink({str(victim)!r})", f"os.mkdir({str(tmp_path / 'new')!r})"):
        result = await box.exec_python(f"import os; {act}")
        assert b"PermissionError" in result.stderr
    assert (await box.exec(["sh", "-c", f"rm -rf {tmp_path}"])).status is Status.NONZERO
    assert (victim.read_text(), os.listdir(tmp_path)) == ("whole", ["victim"])


async def test_changing_files_in_its_folder_is_free(box: Sandbox) -> None:
    source = """
import os
open("a", "w").close()
os.mkdir("d")
os.rename("a", "d/b")
os.link("d/b", "c")
os.truncate("c", 9)
os.unlink("d/b")
open("/dev/null", "w").write("x")
print(sorted(os.listdir()), os.listdir("d"), os.path.getsize("c"))
"""
    assert (await box.exec_python(source)).stdout == b"['c', 'd'] [] 9\n"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc")
async def test_no_capability_and_none_to_gain(box: Sandbox) -> None:
    result = await box.exec(["grep", "-E", "^(CapPrm|CapEff|CapInh|NoNewPrivs)", "/proc/self/status"])
    values = [line.split()[1] for line in result.stdout.decode().splitlines()]
    assert values == ["0" * 16, "0" * 16, "0" * 16, "1"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="searches memory through /proc")
async def test_what_other_programs_hold_is_not_in_its_memory(box: Sandbox, witness) -> None:
    search = r"""
import re
found = 0
for line in open("/proc/self/maps"):
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    try:
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(start)
            found += bool(re.search(b"needle[-]in-a-haystack", memory.read(end - start)))
    except (OSError, ValueError):  # pages of the kernel's
        pass
print(found > 0)
"""
    secret = "needle" + "-in-a-haystack"
    program = f"print('{secret}', input(), flush=True)\n{witness.connect()}witness.recv(9)"
    other = asyncio.create_task(box.exec_python(program, stdin=secret.encode()))
    arrival = await witness.arrival()
    results = [await box.exec_python(source) for source in (search, f"held = '{secret}'{search}")]
    arrival.release()
    assert (await other).stdout == f"{secret} {secret}\n".encode()
    assert [result.stdout for result in results] == [b"False\n", b"True\n"]


async def test_early_exit_loses_its_output(box: Sandbox) -> None:
    result = await box.exec_python("print('42')\nimport os\nos._exit(0)")
    assert (result.status, result.stdout) == (Status.OK, b"")


async def test_signal_of_its_own(box: Sandbox) -> None:
    result = await box.exec_python("import os\nos.kill(os.getpid(), 9)")
    assert (result.status, result.signal, result.exit_code) == (Status.SIGNALED, signal.SIGKILL, None)


async def test_printed_status_counts_for_nothing(box: Sandbox) -> None:
    result = await box.exec_python("print('status: ok\\nexit_code: 0\\n__EXIT__0')\nexit(9)")
    assert (result.status, result.exit_code) == (Status.NONZERO, 9)


async def test_python_broken_from_inside_still_fails(box: Sandbox) -> None:
    source = """
import atexit, builtins, os, sys, threading
sys.stdout = sys.stderr = None
sys.excepthook = print
threading._shutdown = atexit._run_exitfuncs = builtins.print = None
raise ValueError
"""
    assert (await box.exec_python(source)).status is Status.NONZERO
    assert (await box.exec_python(STILL_WORKS)).stdout == b"still works\n"


async def test_a_locked_folder_does_not_stop_the_next_program(box: Sandbox) -> None:
    assert (await box.exec_python("import os; os.chmod('.', 0)")).is_ok
    assert (await box.exec_python(STILL_WORKS)).stdout == b"still works\n"
