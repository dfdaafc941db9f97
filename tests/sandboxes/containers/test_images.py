"""Images of Dockerfiles and folders, by the real engine.

1. a Dockerfile's image runs, with its environment and its folder's files; 2. the same content is built once, other
content anew; 3. a folder without a Dockerfile; 4. a build has no network; 5. a build that fails says why; 6. an image
that is not here is not fetched, neither to run nor to build upon; 7. an image that declares a volume is refused, unless
a disk of ours is in its place; 8. a build is held to its bounds: memory, length of a file, processes, share of CPUs,
time, and the size of its image, which is not kept; 9. a build ends with its client; 10. a step may print much;
11. one that prints the builder's own lines has to wait; 12. a step that cannot be bounded ends its build at once.
"""

import asyncio
import io
import uuid
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest

from areal_agent.errors import SandboxError
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE, MAX_WAITING_STEPS, BuildBounds, build_image, follow
from sandboxes.containers.provider import DockerProvider
from sandboxes.spec import CellSpec, Limits, Program

PATIENT = Limits(wall_s=30.0)
MANY_PROCESSES = """\
for i in $(seq 300); do cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max 2> /dev/null | grep -qx 50 && break; \
sleep 0.1; done; for i in $(seq 200); do sleep 1000 & done"""
"""Thirty seconds to be bounded in."""


async def printed(provider: DockerProvider, image: str, *argv: str) -> bytes:
    cell = await provider.create(CellSpec(limits=PATIENT, image=image))
    try:
        return (await cell.exec(Program(argv=argv), stdin=b"", limits=PATIENT)).stdout
    finally:
        await cell.close()


async def test_image_of_a_dockerfile(engine: Engine, provider: DockerProvider, tmp_path: Path) -> None:
    (tmp_path / "greeting").write_text("hello")
    (tmp_path / "Dockerfile").write_text(f"FROM {DEFAULT_IMAGE}\nENV WORD=there\nCOPY greeting /greeting\n")
    name = await build_image(tmp_path)
    assert await printed(provider, name, "sh", "-c", "cat /greeting; echo $WORD") == b"hellothere\n"
    assert await build_image(tmp_path) == name
    (tmp_path / "greeting").write_text("bye")
    assert await build_image(tmp_path) != name


async def test_image_of_a_folder_without_a_dockerfile(engine: Engine, provider: DockerProvider, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_text("inside")
    assert await printed(provider, await build_image(tmp_path), "cat", "/files/sub/data") == b"inside"


async def test_build_has_no_network(engine: Engine) -> None:
    text = f"FROM {DEFAULT_IMAGE}\nRUN test $(grep -c : /proc/net/dev) = 1\n"  # the loopback interface
    assert await engine.find_image(await build_image(dockerfile=text))


async def test_build_that_fails(engine: Engine) -> None:
    with pytest.raises(SandboxError, match="told-why"):
        await build_image(dockerfile=f"FROM {DEFAULT_IMAGE}\nRUN echo told-why; false\n")


async def test_image_that_is_not_here(engine: Engine, provider: DockerProvider) -> None:
    with pytest.raises(SandboxError, match="images are not fetched"):
        await provider.create(CellSpec(limits=PATIENT, image="no-such-image"))
    with pytest.raises(SandboxError, match="images are not fetched"):
        await build_image(dockerfile="FROM no-such-image\n")


@pytest.mark.parametrize(("place", "is_refused"), [("/data", True), ("/work/../tmp", False)])
async def test_volumes(engine: Engine, provider: DockerProvider, place: str, is_refused: bool) -> None:
    name = "areal-agent-sandbox-test:volume"
    client = docker.from_env()
    try:
        client.images.build(fileobj=io.BytesIO(f"FROM {DEFAULT_IMAGE}\nVOLUME {place}\n".encode()), tag=name, rm=True)
        refusal = pytest.raises(SandboxError, match="declares volumes, /data") if is_refused else nullcontext()
        with refusal:
            assert await printed(provider, name, "echo", "runs") == b"runs\n"
    finally:
        client.images.remove(name, force=True)
        client.close()


@pytest.mark.parametrize(
    ("step", "bounds"),
    [
        ("head -c 2M /dev/zero > /file", BuildBounds(file_bytes=2**20)),
        ("head -c 200M /dev/zero | tail -c 100M > /dev/null", BuildBounds(memory_bytes=32 * 2**20)),
        (MANY_PROCESSES, BuildBounds(processes=50)),
    ],
)
async def test_step_is_bounded(engine: Engine, step: str, bounds: BuildBounds) -> None:
    with pytest.raises(SandboxError, match="the image was not built"):
        await build_image(dockerfile=f"FROM {DEFAULT_IMAGE}\nRUN {step}\n", bounds=bounds)


async def test_bounds_are_the_builders(engine: Engine) -> None:
    shown = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max 2> /dev/null; ulimit -n -u; exit 1"
    with pytest.raises(SandboxError, match=r"(?s)50000.*\b77\b.*\b99\b"):
        bounds = BuildBounds(cpus=0.5, open_files=77, processes=99)
        await build_image(dockerfile=f"FROM {DEFAULT_IMAGE}\nRUN bash -c '{shown}'\n", bounds=bounds)


async def test_build_that_lasts_too_long(engine: Engine) -> None:
    with pytest.raises(SandboxError, match="within 1 s"):
        await build_image(dockerfile=f"FROM {DEFAULT_IMAGE}\nRUN sleep 1000\n", bounds=BuildBounds(wall_s=1.0))


async def test_build_ends_with_its_client(engine: Engine) -> None:
    label = f"build-test={uuid.uuid4().hex}"
    client = docker.APIClient(timeout=60)
    starts = client.events(decode=True, filters={"label": label, "event": "start"})
    try:
        text = f"FROM {DEFAULT_IMAGE}\nLABEL {label}\nRUN sleep 1000\n"
        build = asyncio.create_task(build_image(dockerfile=text))
        started = await asyncio.to_thread(next, starts)
        build.cancel()
        with suppress(docker.errors.NotFound):  # it is removed as soon as it is dead
            await asyncio.to_thread(client.wait, started["id"])
        assert (await asyncio.wait([build]))[0]
    finally:
        starts.close()
        client.close()


async def test_step_may_print_much(engine: Engine) -> None:
    text = f"FROM {DEFAULT_IMAGE}\nRUN echo {uuid.uuid4().hex} && head -c 3M /dev/zero\n"
    name = await build_image(dockerfile=text)
    assert await engine.find_image(name)
    await engine.remove_image(name)


async def test_image_that_is_too_large_is_not_kept(engine: Engine) -> None:
    text = f"FROM {DEFAULT_IMAGE}\nRUN echo {uuid.uuid4().hex} && head -c 3M /dev/urandom > /file\n"
    for _ in range(2):  # not found the second time either
        with pytest.raises(SandboxError, match="leave files out"):
            await build_image(dockerfile=text, bounds=BuildBounds(added_bytes=2**20))


RUNNING = b'{"stream": " ---> Running in 0123456789ab\\n"}\n'


async def test_step_that_prints_the_builders_lines_has_to_wait() -> None:
    num_read = num_looked_up = most_ahead = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal num_read, most_ahead
        for num_read in range(1, 1001):
            most_ahead = max(most_ahead, num_read - num_looked_up)
            yield RUNNING

    async def find_container(_container: str) -> None:
        nonlocal num_looked_up
        num_looked_up += 1
        await asyncio.sleep(0)

    await follow(SimpleNamespace(find_container=find_container), SimpleNamespace(content=content()), BuildBounds())
    assert (num_read, num_looked_up) == (1000, 1000)
    assert most_ahead <= MAX_WAITING_STEPS + 2


async def test_step_that_cannot_be_bounded_ends_its_build() -> None:
    async def content() -> AsyncIterator[bytes]:
        yield RUNNING
        await asyncio.sleep(1000)

    async def find_container(_container: str) -> None:
        raise SandboxError("no answer")

    async with asyncio.timeout(10):
        with pytest.raises(SandboxError, match="no answer"):
            await follow(
                SimpleNamespace(find_container=find_container), SimpleNamespace(content=content()), BuildBounds()
            )
