"""The folders that servers load, made of weights that were pushed as a folder on a disk.

- It has the pushed files, takes no space, and stays when they are removed; files on another disk are copied.
- Servers share the folder of a push; it goes with the last of them, and the pushed one stays.
- A damaged or missing folder, or one without a manifest, is refused and leaves nothing behind.
- A cancelled call leaves nothing behind, and the same push may come again.
"""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DiskWeights
from areal_agent.weights.channels import DiskChannel

NAME = "model.safetensors"
MEMORY = "/dev/shm"


@pytest.fixture
def pushed(tmp_path: Path) -> DiskWeights:
    return DiskChannel(tmp_path / "weights", torch.float32).write({"a": torch.arange(6.0)})


def of_servers(pushed: DiskWeights) -> list[Path]:
    return list((Path(pushed.path).parent / "folders").glob("*"))


async def test_it_stays_when_what_was_pushed_is_removed(pushed: DiskWeights) -> None:
    folder = await WeightFolders().take("first", pushed)
    source = Path(pushed.path)
    whole = (source / NAME).read_bytes()
    assert (folder / NAME).samefile(source / NAME)
    shutil.rmtree(source)
    assert (folder / NAME).read_bytes() == whole


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="there is no second file system")
async def test_what_lies_on_another_disk_is_copied(pushed: DiskWeights) -> None:
    source = Path(pushed.path) / NAME
    whole = source.read_bytes()
    with tempfile.TemporaryDirectory(dir=MEMORY) as elsewhere:
        source.symlink_to(shutil.move(source, elsewhere))
        folder = await WeightFolders().take("first", pushed)
    assert (folder / NAME).read_bytes() == whole and not source.exists()


async def test_it_goes_with_the_last_server(pushed: DiskWeights) -> None:
    folders = WeightFolders()
    one, two, other = [await folders.take(push_id, pushed) for push_id in ("first", "first", "second")]
    assert one == two != other
    await folders.release(one)
    assert one.is_dir()
    await folders.release(two)
    await folders.release(other)
    assert of_servers(pushed) == [] and (Path(pushed.path) / NAME).is_file()


def damage(folder: Path) -> None:
    (folder / NAME).write_bytes(bytes(100))


def unsign(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


@pytest.mark.parametrize("fault", [damage, unsign, rename])
async def test_what_is_wrong_leaves_nothing(pushed: DiskWeights, fault) -> None:
    fault(Path(pushed.path))
    with pytest.raises(WeightUpdateError, match="weights"):
        await WeightFolders().take("first", pushed)
    assert of_servers(pushed) == []


async def test_a_push_that_was_cut_short_may_come_again(pushed: DiskWeights) -> None:
    folders = WeightFolders()
    taking = asyncio.ensure_future(folders.take("first", pushed))
    await asyncio.sleep(0)  # it is being made
    taking.cancel()
    await asyncio.wait({taking})
    assert taking.cancelled() and of_servers(pushed) == []
    await folders.release(await folders.take("first", pushed))
    assert of_servers(pushed) == []
