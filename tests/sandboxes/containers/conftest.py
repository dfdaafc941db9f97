"""A real engine and real containers; where no engine answers, or the default image was not made, tests are skipped."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes.cell import ContainerCell
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE
from sandboxes.containers.provider import DockerProvider
from sandboxes.spec import CellSpec, Limits


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    try:
        engine = await Engine.connect()
    except SandboxError as error:
        pytest.skip(str(error))
    if await engine.find_image(DEFAULT_IMAGE) is None:
        await engine.aclose()
        pytest.skip(f"there is no image {DEFAULT_IMAGE}; `python -m sandboxes image` makes it")
    yield engine
    await engine.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(engine: Engine) -> AsyncIterator[DockerProvider]:
    provider = await DockerProvider.start()
    yield provider
    await provider.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(provider: DockerProvider) -> AsyncIterator[ContainerCell]:
    """One container for the tests of a module: none of them may leave anything."""
    cell = await provider.create(CellSpec(limits=Limits(wall_s=30.0, disk_bytes=16 * 2**20)))
    yield cell
    await cell.close()
