"""Makes records for a ledger, and opens a ledger in a folder of its own."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.images import IMAGES
from areal_agent.ledger.ledger import Ledger
from tests import histories

from .make import Make
from .record import record

collect_ignore = ["worker.py", "record.py"]  # run as programs; no tests, and no doctests


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest_asyncio.fixture
async def ledger(path: Path) -> AsyncIterator[Ledger]:
    async with histories.open_ledger(path.parent) as ledger:
        yield ledger


@pytest.fixture(scope="session")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "ledger.sqlite"
    asyncio.run(record(path))
    return path


@pytest.fixture
def recorded(recorded_once: Path, path: Path) -> Path:
    """A closed ledger and a shard, with sessions in every state."""
    for file in recorded_once.parent.glob("*.sqlite"):
        shutil.copy(file, path.parent)
    shutil.copytree(recorded_once.with_name(IMAGES), path.with_name(IMAGES))
    return path
