"""The folder in which a run hands over weights: its own, and gone with it. It knows nothing of weights.

One that a killed run has left is removed by the next run. That is one whose process is gone, by the number in its name,
and that nobody holds a lock on: containers may share memory, and do not see each other's processes.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "areal_agent-"


@contextmanager
def weights_folder(*, in_memory: bool) -> Generator[Path]:
    """A private folder, in memory if that is asked for and the machine has one (/dev/shm); removed on leaving."""
    has_memory = in_memory and os.access(MEMORY, os.W_OK)
    with folder_in(MEMORY if has_memory else Path(tempfile.gettempdir())) as folder:
        yield folder


@contextmanager
def folder_in(parent: Path) -> Generator[Path]:
    """The same in this place. What killed runs left there is removed first."""
    for leftover in parent.glob(f"{PREFIX}*"):
        if _is_abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=parent) as name, _locked(Path(name)):
        yield Path(name)


def _is_abandoned(folder: Path) -> bool:
    owner = folder.name.removeprefix(PREFIX).partition("-")[0]
    if not owner.isdigit() or _is_alive(int(owner)):
        return False
    try:
        with _locked(folder):
            return True
    except OSError:  # somebody holds it, or it is somebody else's
        return False


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Inside, nobody else can have this. Raises OSError when somebody has it; without locks on a disk, nobody does."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(fd)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
