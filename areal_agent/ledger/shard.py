"""One file of sessions and its one writer: all that a gateway needs. It knows nothing of leases and fates."""

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from areal_agent.ledger import session_writes
from areal_agent.ledger.encoding import encode_completion, encode_ending, encode_turn
from areal_agent.ledger.lock import FileLock
from areal_agent.ledger.opening import open_for_writing
from areal_agent.ledger.tables import FileKind
from areal_agent.ledger.writer import GroupCommitWriter
from areal_agent.types import SessionRecord, Trajectory, Turn

Result = TypeVar("Result")


class LedgerShard:
    """A `protocols.Journal` in a file of its own: what a rollout worker writes, beside the ledger of its run.

    ::

        shard = await LedgerShard.open(shard_path(folder / "ledger.sqlite", "w0"), create=True)
        ...
        await shard.aclose()

    All methods raise LedgerError: for what would break a rule, when the file cannot be written, and once it is closed.
    """

    def __init__(self, lock: FileLock, writer: GroupCommitWriter) -> None:
        self._lock = lock
        self._writer = writer
        self._open_numbers: dict[str, int] = {}  # of sessions that were opened here; spares a look-up a turn

    @classmethod
    async def open(cls, path: str | Path, *, create: bool, kind: FileKind = FileKind.SHARD) -> Self:
        """Open the file; with `create` it is made when there is none, without that is an error.

        Raises LedgerError when another live process writes to it, or when it is of another version.
        """
        path = Path(path)
        lock = await asyncio.to_thread(FileLock.take, path, is_shard=kind is FileKind.SHARD)
        try:
            connection = await asyncio.to_thread(open_for_writing, path, kind, create=create)
        except BaseException:
            lock.release()
            raise
        return cls(lock, GroupCommitWriter(connection))

    async def aclose(self) -> None:
        """Commit what is queued, close the file and free the lock. Idempotent, and finished even when cancelled."""
        self.stop()
        await asyncio.shield(asyncio.to_thread(self.close))

    def stop(self) -> None:
        """Take no more writes. Called in the event loop."""
        self._writer.stop()

    def close(self) -> None:
        """After `stop`: block until all is committed and closed."""
        self._writer.close()
        self._lock.release()

    async def open_session(self, session: SessionRecord) -> None:
        number = await self._writer.run(partial(session_writes.open_session, session=session))
        self._open_numbers[session.id] = number

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        """Add a turn to an open session. The cost is that of its new tokens and messages, whatever the history."""
        await self._writer.run(
            partial(
                session_writes.append_turn,
                session_id=session_id,
                number=self._open_numbers.get(session_id),
                turn=encode_turn(turn),
                completions=[encode_completion(completion) for completion in turn.completions],
            )
        )

    async def close_session(self, trajectory: Trajectory) -> None:
        """End a session. A trajectory for training waits from now on, whatever its status."""
        ending = encode_ending(trajectory)
        self._open_numbers.pop(trajectory.session_id, None)  # who comes later looks it up, and finds its end
        await self._writer.run(partial(session_writes.close_session, session_id=trajectory.session_id, ending=ending))

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Write more into the same file, in the order of the calls. `work` may be done again when a neighbour fails."""
        return await self._writer.run(work)

    async def settle(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """As `run`, for work that ends sessions."""
        self._open_numbers.clear()
        return await self._writer.run(work)
