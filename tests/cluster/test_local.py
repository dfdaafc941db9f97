"""The folder in which a run hands over weights:

- it is private, there while the run goes on, and gone with all that is in it
- what a killed run left is removed by the next one
- one that somebody holds stays, also where its process cannot be seen: it may be another container's
- what is nobody's of ours stays
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agent.cluster.local import PREFIX, folder_in

HOLDER = """
import sys
from pathlib import Path
from areal_agent.cluster.local import folder_in

with folder_in(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("0")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_it_is_private_and_gone_in_the_end(tmp_path: Path):
    with folder_in(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "weights").write_text("0")
    assert list(tmp_path.iterdir()) == []


def test_what_is_held_stays_and_what_a_killed_run_left_is_removed(tmp_path: Path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        with folder_in(tmp_path):
            assert (theirs / "weights").exists()
        unseen = theirs.rename(tmp_path / f"{PREFIX}{dead_process_id()}-theirs")  # as of another container
        with folder_in(tmp_path):
            assert (unseen / "weights").exists()
        unseen.rename(theirs)
        holder.kill()
    with folder_in(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", [PREFIX, f"{PREFIX}notes", "other-1-x"])
def test_what_is_not_ours_stays(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    with folder_in(tmp_path):
        assert (tmp_path / name).exists()


def dead_process_id() -> int:
    """Of a process that has just ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process.pid != os.getpid()
    return process.pid
