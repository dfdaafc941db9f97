"""The working directory.

1. Bytes round-trip, folders are made on the way; 2. a path that leads out is refused, for reading and writing; 3. a
missing file is FileNotFoundError; 4. a file longer than the limit is not read; 5. writing replaces what a program
planted; 6. the folder is private; 7. whatever programs leave is removed: deep, locked, odd, linked outside; 8.
sandboxes do not share a folder. (Odd names, links and FIFOs are rows 10, 11 and 13 of the hostile suite.)
"""

import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes import Pool, Sandbox, Status
from sandboxes.agent.files import remove_tree
from sandboxes.agent.wire import pack
from sandboxes.folder import of_agent
from sandboxes.owner import PREFIX, own_tag
from sandboxes.subprocess import reap_folders
from tests.sandboxes.conftest import BACKENDS

in_every_backend = pytest.mark.parametrize("backend", BACKENDS)


async def path_of(box: Sandbox) -> Path:
    return Path((await box.exec_python("import os; print(os.getcwd(), end='')")).stdout.decode())


@in_every_backend
async def test_bytes_round_trip(box: Sandbox) -> None:
    data = bytes(range(256)) * 5_000
    await box.write("a/b/c.bin", data)
    assert await box.read("a/b/c.bin") == data
    assert (await box.exec(["wc", "-c", "a/b/c.bin"])).stdout.split()[0] == b"1280000"


@in_every_backend
async def test_path_that_leads_out(box: Sandbox) -> None:
    for path in ("../x", "a/../../x", "/etc/hostname", "", ".", "a\0b"):
        with pytest.raises(PermissionError, match="give a path in the working directory"):
            await box.read(path)
        with pytest.raises(PermissionError, match="give a path in the working directory"):
            await box.write(path, b"")


@in_every_backend
async def test_missing_file(box: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await box.read("answer.txt")


@in_every_backend
async def test_file_longer_than_the_limit(box: Sandbox) -> None:
    max_bytes = box.limits.file_bytes
    ample = replace(box.limits, file_bytes=2 * max_bytes)
    await box.exec(["sh", "-c", f"truncate -s {max_bytes} fits; truncate -s {max_bytes + 1} long"], limits=ample)
    assert len(await box.read("fits")) == max_bytes
    with pytest.raises(OSError, match=r"longer than Limits\.file_bytes|too large"):
        await box.read("long")


@in_every_backend
async def test_writing_replaces_what_was_planted(box: Sandbox) -> None:
    await box.exec(["sh", "-c", "mkdir target; ln -s target/x link; mkfifo fifo; ln -s target folder"])
    for name in ("link", "fifo"):
        await box.write(name, b"mine")
        assert await box.read(name) == b"mine"
    with pytest.raises(NotADirectoryError):
        await box.write("folder/x", b"mine")
    with pytest.raises(FileNotFoundError):
        await box.read("target/x")


async def test_folder_is_private(box: Sandbox) -> None:
    folder = await path_of(box)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]


async def test_whatever_programs_leave_is_removed(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("whole")
    source = f"""
import os
os.symlink({str(tmp_path)!r}, "link")
os.mkfifo("fifo")
os.makedirs("locked/inside/deeper")
open("locked/inside/file", "w").close()
os.chmod("locked/inside", 0)
os.chmod("locked", 0)
open(b"\\xff\\n", "w").close()
for _ in range(1200):  # beyond Python's recursion, and the longest path that the kernel takes
    os.mkdir("deep")
    os.chdir("deep")
    open("file", "w").close()
"""
    async with pool.acquire() as box:
        folder = await path_of(box)
        result = await box.exec_python(source)
        assert (result.status, result.stderr) == (Status.OK, b"")
        assert folder.exists()
    assert not folder.exists()
    assert (tmp_path / "outside").read_text() == "whole"


def test_removing_what_is_not_there(tmp_path: Path) -> None:
    remove_tree(tmp_path / "never")
    assert list(tmp_path.iterdir()) == []


def test_removing_follows_no_link_and_needs_few_descriptors(tmp_path: Path, descriptors_left) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.write_text("whole")
    outside.chmod(0o6444)
    (root / "locked").mkdir(parents=True)
    (root / "locked" / "link").symlink_to(outside)
    deepest = Path(root, *["deep"] * 300)
    deepest.mkdir(parents=True)
    os.link(outside, deepest / "hard")
    (root / "locked").chmod(0)
    root.chmod(0)
    with descriptors_left(4):
        remove_tree(root)
    assert not os.path.lexists(root)
    assert (outside.read_text(), stat.S_IMODE(outside.stat().st_mode)) == ("whole", 0o6444)
    root.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        remove_tree(root)
    assert outside.exists()


def test_reaping_leaves_links_and_the_folders_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tag = own_tag().replace(f"{os.getpid()}.", f"{2**22 + 1}.", 1)  # of a process that cannot be
    left, link, kept = (tmp_path / f"{PREFIX}{tag}-{name}" for name in ("left", "link", "kept"))
    left.mkdir()
    link.symlink_to(tmp_path)
    kept.write_text("")
    assert reap_folders() == 1
    assert sorted(tmp_path.iterdir()) == [kept, link]
    if os.getuid() == 0:
        left.mkdir()
        os.chown(left, 12345, 12345)
        assert reap_folders() == 0


@pytest.mark.parametrize("texts", [[b"", b"x", b""] * 100, [b"", b"../x", b""], [b"", b"/x", b""], [b"", b"x"]])
def test_forged_listing_is_refused(texts: list[bytes]) -> None:
    with pytest.raises(OSError):
        of_agent(pack(*texts), max_bytes=20 * 512)


async def test_sandboxes_do_not_share_a_folder(pool: Pool) -> None:
    async with pool.acquire() as one, pool.acquire() as other:
        await one.write("x", b"1")
        with pytest.raises(FileNotFoundError):
            await other.read("x")
        assert await path_of(one) != await path_of(other)
