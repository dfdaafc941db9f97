"""The reader thread: each question sees one consistent state of all files, and never holds up a writer."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from areal_agent.errors import LedgerError
from areal_agent.ledger.files import LedgerFiles, Snapshot

Result = TypeVar("Result")


class SnapshotReader:
    """Owns a thread and the files that it reads. End it with `stop`, then `close`."""

    def __init__(self, files: LedgerFiles) -> None:
        self._files = files
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")
        self._is_closed = False

    async def run(self, question: Callable[[Snapshot], Result]) -> Result:
        """Answer `question` from what is committed now."""
        if self._is_closed:
            raise LedgerError("the ledger is closed: nothing can be read any more; open it again")
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._answer, question)

    def stop(self) -> None:
        """Take no more questions."""
        self._is_closed = True

    def close(self) -> None:
        """After `stop`: block until the last question is answered. Harmless when repeated."""
        self._executor.shutdown()
        self._files.close()

    def _answer(self, question: Callable[[Snapshot], Result]) -> Result:
        try:
            with self._files.snapshot() as snapshot:
                return question(snapshot)
        except sqlite3.Error as error:
            raise LedgerError(
                f"the ledger could not be read: {error}; run `python -m areal_agent.ledger verify`"
            ) from error
