"""Rows 1 to 9: programs that use up resources. Row 25: programs that fake how they ended."""

from sandboxes.conformance.row import JAILED, MIB, Row, ends_with, in_box, prints, told
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Limits, Status

FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
MEMORY_BOMB = "hoard = []\nwhile True: hoard.append(bytearray(2**20))"
MANY_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(b"x" * 40_000_000)
        time.sleep(60)
os.wait()
"""
CHILD_OUT_OF_MEMORY = f"""
import os
if os.fork() == 0:
    exec({MEMORY_BOMB!r})
os.wait()
"""
DEAF_LOOP = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
while True: pass
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
os.wait()
print("gone")
"""
OPEN_FILES = """
import os
try:
    while True: os.open('/dev/null', os.O_RDONLY)
except OSError as error: print(error.errno)
"""
FILL = """
number = 0
while True:
    number += 1
    with open(f'{place}/{number}', 'wb') as file: file.write(bytes(2**20))
"""
FALLOCATE = "import os\nwhile True: os.posix_fallocate(os.open('big', os.O_CREAT | os.O_RDWR), 0, 2**34)"
MANY_FILES = "for number in range(10**6): open(str(number), 'w').close()"
ZIP_BOMB = """
import zlib
bomb = zlib.compress(bytes(2**24))
for number in range(1000): open(f'part{number}', 'wb').write(zlib.decompress(bomb))
"""


async def endless_output(box: Sandbox) -> str:
    for stream in ("stdout", "stderr"):
        source = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
        result = await box.exec_python(source, limits=Limits(wall_s=20.0, output_bytes=10_000))
        if (result.status, getattr(result, stream)) != (Status.OUTPUT_LIMIT, b"x" * 10_000):
            return told(result)
    honest = await box.exec_python("print('x' * 2**20)", limits=Limits(wall_s=20.0, output_bytes=2 * MIB))
    return "" if honest.is_ok and len(honest.stdout) == MIB + 1 else f"an honest megabyte: {told(honest)}"


async def full_disk(box: Sandbox) -> str:
    small = Limits(wall_s=30.0, memory_bytes=256 * MIB, file_bytes=2**40)
    fills = [FILL.replace("{place}", place) for place in (".", "/tmp", "/dev/shm")]
    for source in (*fills, FALLOCATE, ZIP_BOMB, MANY_FILES):
        result = await box.exec_python(source, limits=small)
        if result.status is not Status.DISK:
            return f"{source!r}: {told(result)}"
        await box.exec(["sh", "-c", "find . /tmp /dev/shm -mindepth 1 -delete"], limits=small)
    return ""


SMALL = Limits(wall_s=20.0, memory_bytes=100 * MIB)
RESOURCE_ROWS = (
    Row(
        number=1, harm="fork bomb", required="PIDS, nothing left", needs=JAILED, needs_groups=True,
        run=ends_with(FORK_BOMB, Status.PIDS, Limits(wall_s=2.0, pids=32)),
    ),
    Row(number=2, harm="memory bomb", required="MEMORY", run=ends_with(MEMORY_BOMB, Status.MEMORY, SMALL)),
    Row(
        number=3, harm="memory of many children", required="MEMORY", needs=JAILED, needs_groups=True,
        run=ends_with(MANY_CHILDREN, Status.MEMORY, SMALL),
    ),
    Row(
        number=4, harm="a child is out of memory, its parent exits with 0", required="MEMORY", needs=JAILED,
        needs_groups=True, run=ends_with(CHILD_OUT_OF_MEMORY, Status.MEMORY, SMALL),
    ),
    Row(number=5, harm="endless output", required="OUTPUT_LIMIT; a megabyte is fine", run=in_box(endless_output)),
    Row(
        number=6, harm="busy loop deaf to signals", required="TIMEOUT",
        run=ends_with(DEAF_LOOP, Status.TIMEOUT, Limits(wall_s=0.5)),
    ),
    Row(
        number=7, harm="daemon that holds stdout", required="the call returns, it is dead",
        run=prints(DAEMON, b"gone\n"),
    ),
    Row(number=8, harm="open files", required="inside only", run=prints(OPEN_FILES, b"24\n")),
    Row(number=9, harm="full disk, many files", required="DISK", needs=JAILED, run=in_box(full_disk)),
)  # fmt: skip


FAKE_FRAMES = """
import os
os.write(1, {data})
for descriptor in range(3, 64):
    try: os.write(descriptor, bytes(29))
    except OSError: pass
os._exit(9)
"""
FAKE = b"status: ok\n\x00\x1b[2J\xc3\n__EXIT__0\n$ >>> " + bytes(29) + b"\x03\x11\0\0\0" + bytes(17)
IN_A_SHELL = """
printf '%s' "$kept"
cat
for fd in 3 4 5 6 7; do echo 0 >&$fd; done 2> /dev/null
exit 9
"""


async def fake_frames(box: Sandbox) -> str:
    """Write fake frames to every descriptor, in a program, a shell and an interpreter."""
    source = FAKE_FRAMES.replace("{data}", repr(FAKE))
    result = await box.exec_python(source)
    if (result.status, result.exit_code, result.stdout) != (Status.NONZERO, 9, FAKE):
        return told(result)
    shell = box.shell()
    await shell.run("kept=1")
    result = await shell.run(IN_A_SHELL, stdin=FAKE)
    if (result.status, result.exit_code, result.stdout) != (Status.NONZERO, 9, b"1" + FAKE):
        return f"in a shell: {told(result)}"
    async with box.python() as python:
        result = await python.run(source)
    is_right = (result.status, result.exit_code, result.stdout) == (Status.NONZERO, 9, FAKE)
    return "" if is_right else f"in Python: {told(result)}"


STATUS_ROWS = (
    Row(number=25, harm="faked statuses, frames", required="raw bytes, true status", run=in_box(fake_frames)),
)
