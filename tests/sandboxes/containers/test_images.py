"""Images of Dockerfiles and folders, by the real engine.

1. a Dockerfile's image runs, with its environment and its folder's files; 2. the same content is built once, other
content anew; 3. a folder without a Dockerfile; 4. a build has no network; 5. a build that fails says why; 6. an image
that is not here is not fetched, neither to run nor to build upon; 7. an image that declares a volume is refused, unless
a disk of ours is in its place.
"""

import io
from contextlib import nullcontext
from pathlib import Path

import docker
import pytest

from areal_agent.errors import SandboxError
from sandboxes.base import Program
from sandboxes.containers.base_image import DEFAULT_IMAGE
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import build_image_with
from sandboxes.containers.provider import DockerProvider
from sandboxes.limits import Limits
from sandboxes.spec import CellSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = Limits(wall_s=30.0)


async def printed(provider: DockerProvider, image: str, *argv: str) -> bytes:
    cell = await provider.create(CellSpec(limits=PATIENT, image=image))
    try:
        return (await cell.exec(Program(argv=argv), stdin=b"", limits=PATIENT)).stdout
    finally:
        await cell.close()


async def test_image_of_a_dockerfile(engine: Engine, provider: DockerProvider, tmp_path: Path) -> None:
    (tmp_path / "greeting").write_text("hello")
    (tmp_path / "Dockerfile").write_text(f"FROM {DEFAULT_IMAGE}\nENV WORD=there\nCOPY greeting /greeting\n")
    name = await build_image_with(engine, tmp_path, None)
    assert await printed(provider, name, "sh", "-c", "cat /greeting; echo $WORD") == b"hellothere\n"
    assert await build_image_with(engine, tmp_path, None) == name
    (tmp_path / "greeting").write_text("bye")
    assert await build_image_with(engine, tmp_path, None) != name


async def test_image_of_a_folder_without_a_dockerfile(engine: Engine, provider: DockerProvider, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_text("inside")
    assert (
        await printed(provider, await build_image_with(engine, tmp_path, None), "cat", "/files/sub/data") == b"inside"
    )


async def test_build_has_no_network(engine: Engine) -> None:
    text = f"FROM {DEFAULT_IMAGE}\nRUN test $(grep -c : /proc/net/dev) = 1\n"  # the loopback interface
    assert await engine.has_image(await build_image_with(engine, None, text))


async def test_build_that_fails(engine: Engine) -> None:
    with pytest.raises(SandboxError, match="told-why"):
        await build_image_with(engine, None, f"FROM {DEFAULT_IMAGE}\nRUN echo told-why; false\n")


async def test_image_that_is_not_here(engine: Engine, provider: DockerProvider) -> None:
    with pytest.raises(SandboxError, match="none is fetched"):
        await provider.create(CellSpec(limits=PATIENT, image="no-such-image"))
    with pytest.raises(SandboxError, match="none is fetched"):
        await build_image_with(engine, None, "FROM no-such-image\n")


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
