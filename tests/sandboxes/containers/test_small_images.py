"""Images that have less than the default one: the agent has a Python of its own there.

1. where Python lacks `ctypes`, and where it is broken or there is none: programs, Python source, streams,
limits, files and tars as ever, with all walls; 2. root in an image that can be written to; 3. nobody may change the
agent's Python, and it is copied once.
"""

import asyncio

import pytest

from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE, build_image
from sandboxes.containers.own_python import PLACE, python_volume
from sandboxes.containers.provider import DockerProvider
from sandboxes.folder import Entry
from sandboxes.spec import CellSpec, Limits, Program, Status

PATIENT = Limits(wall_s=60.0)
IMAGES = {
    "minimal": f"FROM {DEFAULT_IMAGE}\nRUN rm -r /usr/lib/python3.*/ctypes /usr/lib/python3.*/lib-dynload/_ctypes.*\n",
    "old": f"FROM {DEFAULT_IMAGE}\nRUN ln -sf /bin/false /usr/bin/python3\n",
    "bare": f"FROM {DEFAULT_IMAGE}\nRUN rm -rf /usr/bin/python3* /usr/lib/python3* /lib/*/libffi* /lib/*/libz.*\n",
}


@pytest.mark.parametrize("name", IMAGES)
async def test_image_without_a_whole_python(engine: Engine, provider: DockerProvider, name: str) -> None:
    image = await build_image(dockerfile=IMAGES[name])
    cell = await provider.create(CellSpec(limits=PATIENT, image=image, user="77"))
    python = await cell.exec(Program(source="import ctypes; print(input(), __name__)"), stdin=b"hi", limits=PATIENT)
    assert python.stdout == b"hi __main__\n"
    walls = Program(argv=("sh", "-c", "id -u; grep ^Seccomp: /proc/self/status"))
    assert (await cell.exec(walls, stdin=b"", limits=PATIENT)).stdout == b"77\nSeccomp:\t2\n"
    limits = Limits(wall_s=60.0, open_files=17, file_bytes=1024)
    shown = await cell.exec(Program(argv=("sh", "-c", "ulimit -n; exec yes > big")), stdin=b"", limits=limits)
    assert (shown.status, shown.stdout) == (Status.DISK, b"17\n")
    process = await cell.spawn(Program(argv=("cat",)), limits=PATIENT, is_timed=False)
    await process.write(b"echo")
    assert await anext(process.stdout) == b"echo"
    await cell.upload([Entry(path="b", data=b"data")], "a")
    assert await cell.read("a/b") == b"data"
    assert [entry.data for entry in await cell.download("a", 4096)] == [b"data"]
    await cell.close()


async def test_root_in_an_image_without_python(engine: Engine, provider: DockerProvider) -> None:
    image = await build_image(dockerfile=IMAGES["bare"])
    cell = await provider.create(CellSpec(limits=PATIENT, image=image, user="0", workdir="/", is_writable=True))
    change = f"touch /etc/x && grep CapEff /proc/self/status; touch {PLACE}/ready/x || mv {PLACE}/ready {PLACE}/x"
    shown = await cell.exec(Program(argv=("sh", "-c", change)), stdin=b"", limits=PATIENT)
    assert (shown.status, shown.stdout) == (Status.NONZERO, b"CapEff:\t000000000000000b\n")
    assert shown.stderr.count(b"Read-only file system") == 2
    assert cell.archives is not None
    await cell.close()


async def test_python_is_copied_once(engine: Engine, provider: DockerProvider) -> None:
    labels = provider.ownership.labels
    assert len({*await asyncio.gather(*(python_volume(engine, labels) for _ in range(3)))}) == 1
