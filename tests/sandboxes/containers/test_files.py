"""Files of a container, from a host that trusts nothing in it.

1. bytes round-trip, under strange names; 2. what is no regular file is not read, and no link is followed; 3. a file
that is too long; 4. what stands in the way of a written file is replaced, a link to a folder is not gone through;
5. paths that lead out; 6. a folder round-trips as a tar, with what may be run; 7. of a hostile folder only files and
folders come; 8. more than asked for; 9. a full disk.
"""

import os

import pytest

from sandboxes import folder
from sandboxes.base import Program
from sandboxes.containers.cell import AgentCell
from sandboxes.spec import Limits

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = Limits(wall_s=30.0)


@pytest.mark.parametrize("name", ["a/b/c.txt", "new\nline", os.fsdecode(b"not-utf8-\xff"), "a" * 200])
async def test_bytes_round_trip(cell: AgentCell, name: str) -> None:
    data = bytes(range(256)) * 1000
    await cell.write(name, data)
    assert await cell.read(name) == data


async def test_only_regular_files_are_read(cell: AgentCell) -> None:
    traps = "mkdir -p traps/folder; cd traps; mkfifo fifo; ln -s /etc/passwd link; ln -s / root"
    await cell.exec(Program(argv=("sh", "-c", traps)), stdin=b"", limits=PATIENT)
    for name in ("fifo", "link", "folder", "root/etc/passwd", "nothing"):
        with pytest.raises(OSError):
            await cell.read(f"traps/{name}")


async def test_file_that_is_too_long(cell: AgentCell) -> None:
    await cell.exec(Program(argv=("truncate", "-s", "15M", "fits")), stdin=b"", limits=PATIENT)
    assert len(await cell.read("fits")) == 15 * 2**20
    await cell.exec(
        Program(argv=("truncate", "-s", "17M", "long")), stdin=b"", limits=Limits(wall_s=30.0, file_bytes=2**30)
    )
    with pytest.raises(OSError, match="too large"):
        await cell.read("long")
    await cell.exec(Program(argv=("rm", "fits", "long")), stdin=b"", limits=PATIENT)


async def test_what_stands_in_the_way_of_a_written_file(cell: AgentCell) -> None:
    way = "mkdir -p way/target; cd way; ln -s target/x link; mkfifo fifo; ln -s target folder"
    await cell.exec(Program(argv=("sh", "-c", way)), stdin=b"", limits=PATIENT)
    for name in ("link", "fifo"):
        await cell.write(f"way/{name}", b"mine")
        assert await cell.read(f"way/{name}") == b"mine"
    with pytest.raises(OSError):
        await cell.write("way/folder/x", b"mine")
    with pytest.raises(FileNotFoundError):
        await cell.read("way/target/x")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", ""])
async def test_paths_that_lead_out(cell: AgentCell, path: str) -> None:
    with pytest.raises(PermissionError):
        await cell.read(path)
    with pytest.raises(PermissionError):
        await cell.write(path, b"")


async def test_folder_round_trips_as_a_tar(cell: AgentCell) -> None:
    entries = [
        folder.Entry(path="empty", data=None),
        folder.Entry(path="run.sh", data=b"#!/bin/sh\necho ran", is_executable=True),
        folder.Entry(path="sub", data=None),
        folder.Entry(path="sub/data", data=b"\0\xff"),
    ]
    await cell.upload(folder.pack(entries), "tree/deep")
    assert folder.entries_of(await cell.download("tree/deep", 10_000)) == entries
    assert (await cell.exec(Program(argv=("tree/deep/run.sh",)), stdin=b"", limits=PATIENT)).stdout == b"ran\n"


async def test_of_a_hostile_folder_only_files_and_folders_come(cell: AgentCell) -> None:
    hostile = "mkdir hostile; cd hostile; mkfifo fifo; ln -s /etc link; ln -s /etc/passwd file; echo x > real"
    await cell.exec(Program(argv=("sh", "-c", hostile)), stdin=b"", limits=PATIENT)
    entries = folder.entries_of(await cell.download("hostile", 10_000))
    assert [(entry.path, entry.data) for entry in entries] == [("real", b"x\n")]


async def test_more_than_asked_for(cell: AgentCell) -> None:
    await cell.write("big/file", bytes(20_000))
    with pytest.raises(OSError, match="too large"):
        await cell.download("big", 10_000)


async def test_full_disk(cell: AgentCell) -> None:
    with pytest.raises(OSError, match="No space left"):
        await cell.write("too-much", bytes(13 * 2**20))
    await cell.exec(Program(argv=("rm", "too-much")), stdin=b"", limits=PATIENT)
