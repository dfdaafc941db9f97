"""Hostile programs without walls, beyond the rows of the hostile suite (test_conformance.py).

1. No daemon and no child outlives its program, as a witness sees; 2. closing every descriptor, and writing to every
descriptor; 3. `kill(-1)`, and signals to the launcher and the host; 4. the host's environment; 5. another process's
environment and memory; 6. changing files outside its folder, which inside is free; 7. capabilities; 8. what other
programs hold, searched in its own memory; 9. a Python broken from inside; 10. a working directory that is locked.
"""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from sandboxes import Pool, Sandbox, Status, open_pool

STILL_WORKS = "print('still works')"


def requires(pool: Pool, promise: str) -> None:
    """Skip where the kernel cannot give what the test is about; `capabilities` must then say so."""
    if f"no {promise}" not in pool.capabilities().enforces:
        assert promise in pool.capabilities().cannot_stop
        pytest.skip(f"this kernel cannot stop {promise}")


HOLDS_STDOUT = """
if os.fork(): os.wait()
else:
    os.setsid()
    if os.fork(): os._exit(0)
    witness.recv(9)
"""
PROGRAM_RUNS_ON = """
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 3)
        witness.recv(9)
    os._exit(0)
os.wait()
"""
CHILDREN = """
for _ in range(20):
    if os.fork() == 0: witness.recv(9)
"""


@pytest.mark.parametrize("source", [HOLDS_STDOUT, PROGRAM_RUNS_ON, CHILDREN], ids=["daemon", "lone daemon", "children"])
async def test_nothing_outlives_its_program(box: Sandbox, witness, source: str) -> None:
    assert (await box.exec_python(f"import os\n{witness.connect()}{source}")).status is Status.OK
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
