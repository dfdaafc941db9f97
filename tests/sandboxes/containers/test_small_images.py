"""Images that have less than the default one.

1. a Python without `ctypes`, `json` and `resource` runs the agent: programs, limits and files as ever; 2. without any
Python programs run by the engine's own exec: output, stdin, status, limits, files, and nothing is left of them; what
cannot be given is refused; 3. a stdin that ends before the host can hear the script runs nothing; 4. where Python is
not whole or there is none, root has three capabilities and no agent.
"""

import asyncio
import io
from asyncio.subprocess import PIPE

import pytest

from areal_agent.errors import SandboxError
from sandboxes.base import Program
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE, build_image_with
from sandboxes.containers.plain_cell import PlainCell, shell
from sandboxes.containers.provider import DockerProvider
from sandboxes.spec import CellSpec, Limits, Status

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = Limits(wall_s=60.0)
AS_MINIMAL = """
cd /usr/lib/python3.* && rm -r ctypes json dataclasses.py asyncio tempfile.py shutil.py pathlib.py inspect.py
rm -f lib-dynload/resource.* lib-dynload/_ctypes.* lib-dynload/_json.* lib-dynload/mmap.*
"""


async def test_python_without_ctypes_runs_the_agent(engine: Engine, provider: DockerProvider) -> None:
    command = " && ".join(AS_MINIMAL.strip().splitlines())
    image = await build_image_with(engine, None, f"FROM {DEFAULT_IMAGE}\nRUN {command}\n")
    cell = await provider.create(CellSpec(limits=PATIENT, image=image, user="77"))
    python = await cell.exec(Program(source="print(input(), __name__)"), stdin=b"hi", limits=PATIENT)
    assert python.stdout == b"hi __main__\n"
    assert (await cell.exec(Program(argv=("id", "-u")), stdin=b"", limits=PATIENT)).stdout == b"77\n"
    limits = Limits(wall_s=60.0, open_files=17, file_bytes=1024)
    shown = await cell.exec(Program(argv=("sh", "-c", "ulimit -n; exec yes > big")), stdin=b"", limits=limits)
    assert (shown.status, shown.stdout) == (Status.DISK, b"17\n")
    await cell.write("a/b", b"data")
    assert await cell.read("a/b") == b"data"
    await cell.close()


async def test_image_without_python(engine: Engine, provider: DockerProvider) -> None:
    image = await build_image_with(engine, None, f"FROM {DEFAULT_IMAGE}\nRUN rm /usr/bin/python3*\n")
    cell = await provider.create(CellSpec(limits=PATIENT, image=image, user="77"))
    try:
        result = await cell.exec(Program(argv=("sh", "-c", "id -u; cat; exit 3")), stdin=b"hi", limits=PATIENT)
        assert (result.status, result.exit_code, result.stdout) == (Status.NONZERO, 3, b"77\nhi")
        late = await cell.exec(Program(argv=("sleep", "1000")), stdin=b"", limits=Limits(wall_s=0.5))
        assert late.status is Status.TIMEOUT
        much = await cell.exec(Program(argv=("yes",)), stdin=b"", limits=Limits(wall_s=60.0, output_bytes=1000))
        assert (much.status, len(much.stdout), much.truncated) == (Status.OUTPUT_LIMIT, 1000, True)
        left = await cell.exec(Program(argv=("sh", "-c", "ls -d /proc/[0-9]*")), stdin=b"", limits=PATIENT)
        assert len(left.stdout.split()) <= 4  # the first process and its child, the shell and ls
        await cell.write("a/b", b"data")
        assert await cell.read("a/b") == b"data"
        with pytest.raises(OSError, match="cannot be reached"):
            await cell.read("a")
        with pytest.raises(SandboxError, match="without python3"):
            await cell.spawn(Program(argv=("true",)), limits=PATIENT, is_timed=False)
    finally:
        await cell.close()
    assert not await cell.answers()


async def test_stdin_that_ends_at_once_runs_nothing() -> None:
    for line, printed in ((b"", b""), (b"\n", b"ran\n")):
        ran = await asyncio.create_subprocess_exec(*shell("echo ran"), stdin=PIPE, stdout=PIPE)
        assert await ran.communicate(line) == (printed, None)


@pytest.mark.parametrize("command", ["rm /usr/bin/python3*", " && ".join(AS_MINIMAL.strip().splitlines())])
async def test_root(engine: Engine, provider: DockerProvider, command: str) -> None:
    image = await build_image_with(engine, None, f"FROM {DEFAULT_IMAGE}\nRUN {command}\n")
    cell = await provider.create(CellSpec(limits=PATIENT, image=image, user="0", workdir="/srv/a", is_writable=True))
    script = "pwd; id -u; grep CapEff /proc/self/status; echo hi > /etc/new; mkdir /srv/a/b"
    result = await cell.exec(Program(argv=("sh", "-c", script)), stdin=b"", limits=PATIENT)
    assert result.stdout == b"/srv/a\n0\nCapEff:\t000000000000000b\n"
    assert (await cell.exec(Program(argv=("pwd",), cwd="b"), stdin=b"", limits=PATIENT)).stdout == b"/srv/a/b\n"
    assert isinstance(cell, PlainCell) and cell.archives is not None
    tar = io.BytesIO()
    await cell.archives.save("/etc/new", tar, 10_000)
    assert b"hi\n" in tar.getvalue()
    await cell.close()
