"""The reader thread: each question sees one consistent state of the file, and never holds up the writer."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from areal_agent.errors import LedgerError

Result = TypeVar("Result")


class SnapshotReader:
    """Owns a thread and a connection that cannot write. End it with `stop`, then `close`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")
        self._is_closed = False

    async def run(self, question: Callable[[sqlite3.Connection], Result]) -> Result:
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
        self._connection.close()

    def _answer(self, question: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            self._connection.execute("BEGIN")
            try:
                return question(self._connection)
            finally:
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(
                f"the ledger could not be read: {error}; run `python -m areal_agent.ledger verify`"
            ) from error
