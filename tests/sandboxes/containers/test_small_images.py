"""Images that have less than the default one.

1. a Python without `ctypes`, `json` and `resource` runs the agent: programs, limits and files as ever.
"""

import pytest

from sandboxes.base import Program
from sandboxes.containers.base_image import DEFAULT_IMAGE
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import build_image_with
from sandboxes.containers.provider import DockerProvider
from sandboxes.limits import Limits
from sandboxes.result import Status
from sandboxes.spec import CellSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = Limits(wall_s=60.0)
AS_MINIMAL = """
cd /usr/lib/python3.* && rm -r ctypes json dataclasses.py asyncio tempfile.py shutil.py pathlib.py inspect.py
rm -f lib-dynload/resource.* lib-dynload/_ctypes.* lib-dynload/_json.* lib-dynload/mmap.*
"""


async def test_python_without_ctypes_runs_the_agent(engine: Engine, provider: DockerProvider) -> None:
    command = " && ".join(AS_MINIMAL.strip().splitlines())
    image = await build_image_with(engine, None, f"FROM {DEFAULT_IMAGE}\nRUN {command}\n")
    cell = await provider.create(CellSpec(limits=PATIENT, image=image))
    python = await cell.exec(Program(source="print(input(), __name__)"), stdin=b"hi", limits=PATIENT)
    assert python.stdout == b"hi __main__\n"
    assert (await cell.exec(Program(argv=("id", "-u")), stdin=b"", limits=PATIENT)).stdout == b"65534\n"
    limits = Limits(wall_s=60.0, open_files=17, file_bytes=1024)
    shown = await cell.exec(Program(argv=("sh", "-c", "ulimit -n; exec yes > big")), stdin=b"", limits=limits)
    assert (shown.status, shown.stdout) == (Status.DISK, b"17\n")
    await cell.write("a/b", b"data")
    assert await cell.read("a/b") == b"data"
    await cell.close()
