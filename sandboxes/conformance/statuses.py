"""Row 25: what a program says of its own end."""

from sandboxes.conformance.row import Row, in_box, told
from sandboxes.result import Status
from sandboxes.sandbox import Sandbox

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
    """To every descriptor that it finds, in a program, a shell and an interpreter."""
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


ROWS = (Row(number=25, harm="faked statuses, frames", required="raw bytes, true status", run=in_box(fake_frames)),)
