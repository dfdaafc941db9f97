"""One live writer a file. It knows nothing of what is written.

The lock is the kernel's: it ends with the process that holds it, however that ends, and a left-over file locks nothing.
"""

import fcntl
import os
from pathlib import Path
from typing import Self

from areal_agent.errors import LedgerError


class FileLock:
    """An exclusive lock on a file of a ledger, from `take` until `release`."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def take(cls, path: Path, *, is_shard: bool) -> Self:
        """Raises LedgerError, naming the folder, when another process holds it."""
        try:
            fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LedgerError(
                f"the ledger {path} cannot be locked: {error.strerror}; check that its folder exists and "
                "that you may write there"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                raise LedgerError(
                    f"the ledger {path} cannot be locked: {error.strerror}; put the run folder on a local disk"
                ) from None
            raise LedgerError(_taken(path, is_shard=is_shard)) from None
        return cls(fd)

    def release(self) -> None:
        """Harmless when it was released before."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _taken(path: Path, *, is_shard: bool) -> str:
    if is_shard:
        return (
            f"a worker is still writing to {path.name} of the run folder {path.parent}; wait until it has ended, "
            "or stop it"
        )
    return f"another process is writing to the run folder {path.parent}; wait until that run has ended, or stop it"
