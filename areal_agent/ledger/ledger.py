"""The ledger as everybody else uses it: an asyncio face over the one file of a run. It holds no state of its own.

Every write returns when it is durable. `Journal` (protocols.py) is the part that the gateway uses; the rest is the
bookkeeping of what becomes of a trajectory: waiting, leased, trained or dropped.
"""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from areal_agent.errors import LedgerError
from areal_agent.ledger import reads, writes
from areal_agent.ledger.encoding import encode_completion, encode_ending, encode_note, encode_rewards, encode_turn
from areal_agent.ledger.lock import FolderLock
from areal_agent.ledger.reader import SnapshotReader
from areal_agent.ledger.records import Incarnation, LedgerCounts
from areal_agent.ledger.schema import open_for_reading, open_for_writing
from areal_agent.ledger.writer import GroupCommitWriter
from areal_agent.types import Drop, Rewards, SessionRecord, Trajectory, Turn


class Ledger:
    """The one live writer of a run's ledger.

    ::

        ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
        await ledger.begin_incarnation(checkpoint_step=0)
        ...
        await ledger.aclose()

    All methods raise LedgerError: for what would break a rule, when the file cannot be written, and once it is closed.
    """

    def __init__(self, lock: FolderLock, writer: GroupCommitWriter, reader: SnapshotReader) -> None:
        self._lock = lock
        self._writer = writer
        self._reader = reader

    @classmethod
    async def open(cls, path: str | Path, *, create: bool) -> Self:
        """Open the ledger at `path`; with `create` it is made when there is none, without that is an error.

        Raises LedgerError when another live process writes to it, or when the file is of another version.
        """
        path = Path(path)
        lock = await asyncio.to_thread(FolderLock.take, path)
        try:
            connection = await asyncio.to_thread(open_for_writing, path, create=create)
            reading = await asyncio.to_thread(open_for_reading, path)
        except BaseException:
            lock.release()
            raise
        return cls(lock, GroupCommitWriter(connection), SnapshotReader(reading))

    async def aclose(self) -> None:
        """Commit what is queued, close the file and free the lock. Idempotent, and finished even when cancelled."""
        self._reader.stop()
        self._writer.stop()
        await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        self._reader.close()  # first: the last connection to close folds the write-ahead log into the file
        self._writer.close()
        self._lock.release()

    async def begin_incarnation(self, checkpoint_step: int | None) -> Incarnation:
        """Start a process of the run at the checkpoint of `checkpoint_step` (0: at the initial weights).

        None: at whatever step a trainer elsewhere is; what it has leased stays leased.

        In one transaction: sessions that a dead process left open end as orphans; leases up to the checkpoint are
        trained, for it may have been published and not yet committed; what came after it waits again. Call it first.
        """
        return await self._writer.run(
            partial(writes.begin_incarnation, checkpoint_step=checkpoint_step, now_s=time.time())
        )

    async def open_session(self, session: SessionRecord) -> None:
        await self._writer.run(partial(writes.open_session, session=session))

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        """Add a turn to an open session. The cost is that of its new tokens and messages, whatever the history."""
        row = encode_turn(turn)
        completions = [encode_completion(completion) for completion in turn.completions]
        await self._writer.run(partial(writes.append_turn, session_id=session_id, turn=row, completions=completions))

    async def close_session(self, trajectory: Trajectory) -> None:
        """End a session. A trajectory for training waits from now on, whatever its status."""
        ending = encode_ending(trajectory)
        await self._writer.run(partial(writes.close_session, session_id=trajectory.session_id, ending=ending))

    async def lease(self, step: int, digests: Mapping[str, str], num_loss_tokens: Mapping[str, int]) -> None:
        """Lease waiting trajectories for train step `step`, all or none.

        Both mappings are by session id: `digest.token_digest` of the trajectory, and how many of its tokens are in
        the loss.
        """
        if digests.keys() != num_loss_tokens.keys():
            odd = sorted(digests.keys() ^ num_loss_tokens.keys())
            raise LedgerError(f"a lease needs a digest and a number of loss tokens for every session; odd: {odd}")
        leases = [
            writes.Lease(session_id=session_id, digest=digest, num_loss_tokens=num_loss_tokens[session_id])
            for session_id, digest in digests.items()
        ]
        await self._writer.run(partial(writes.lease, step=step, leases=leases))

    async def drop(self, drops: Mapping[str, Drop]) -> None:
        """Give waiting trajectories their fate, by session id, all or none. What is leased cannot be dropped."""
        await self._writer.run(partial(writes.drop, drops=dict(drops)))

    async def return_leases(self, after_step: int) -> int:
        """A trainer goes on from the checkpoint of `after_step`: what it leased later waits again; how many.

        What that checkpoint holds is trained: it may have been published and not yet committed.
        """
        return await self._writer.run(partial(writes.return_leases, after_step=after_step))

    async def set_rewards(self, session_id: str, rewards: Rewards) -> None:
        """Replace what a waiting trajectory has earned; one whose status is `missing_reward` is completed by it."""
        columns = encode_rewards(rewards)
        await self._writer.run(
            partial(writes.set_rewards, session_id=session_id, rewards=columns, is_missing=rewards.is_missing)
        )

    async def commit_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint that contains every step up to `step` is published: what was leased for those is trained."""
        await self._writer.run(partial(writes.commit_checkpoint, step=step, path=path))

    async def trajectory(self, session_id: str) -> Trajectory:
        """A closed session, with its turns and its fate."""
        return await self._reader.run(partial(reads.trajectory, session_id=session_id))

    async def waiting(self) -> tuple[Trajectory, ...]:
        """What could be leased or dropped now, in the order of closing."""
        return await self._reader.run(reads.waiting)

    async def leased(self, step: int) -> tuple[Trajectory, ...]:
        """What is leased for train step `step` and not yet trained."""
        return await self._reader.run(partial(reads.leased, step=step))

    async def session_with_key(self, key_hash: str) -> str | None:
        """The id of the session, open or closed, that has this key; None when there is none."""
        return await self._reader.run(partial(reads.session_with_key, key_hash=key_hash))

    async def next_group_number(self) -> int:
        """One more than the highest number of a group id like `g000012`; 0 when there is none."""
        return await self._reader.run(reads.next_group_number)

    async def counts(self) -> LedgerCounts:
        return await self._reader.run(reads.counts)

    async def count_tokens(self) -> tuple[int, int]:
        """Tokens sampled in training sessions, and loss tokens of the trajectories that are trained."""
        return await self._reader.run(reads.count_tokens)

    async def set_note(self, key: str, value: Any) -> None:
        """Keep a value of JSON's kinds about the run.

        `status` is read by `verify`: in a run that is `"completed"` nothing may be left over. It is `"running"` from
        `begin_incarnation` until it is set.
        """
        await self._writer.run(partial(writes.set_note, key=key, text=encode_note(key, value)))

    async def get_note(self, key: str) -> Any:
        """The value that was set, or None."""
        return await self._reader.run(partial(reads.note, key=key))
