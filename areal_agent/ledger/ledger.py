"""The ledger as everybody else uses it: an asyncio face over the files of a run. It holds no state of its own.

Every write returns when it is durable. `Journal` (protocols.py) is the part that the gateway uses; the rest is the
bookkeeping of what becomes of a trajectory, in whatever file its session is: waiting, leased, trained or dropped.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions, writes
from areal_agent.ledger.encoding import encode_note, encode_rewards
from areal_agent.ledger.files import FileKind, LedgerFiles, shard_path, shard_paths
from areal_agent.ledger.reads import Incarnation, LedgerCounts
from areal_agent.ledger.shard import LedgerShard, SnapshotReader, end_orphans_of, fold
from areal_agent.types import Drop, Rewards, SessionRecord, Trajectory, Turn


class Ledger:
    """The one live writer of a run's bookkeeping, and of sessions of its own.

    ::

        ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
        await ledger.begin_incarnation(checkpoint_step=0)
        ...
        await ledger.aclose()

    It reads the sessions of every shard beside it, also of those that a worker makes later (`LedgerShard`).
    All methods raise LedgerError: for what would break a rule, when a file cannot be written, and once it is closed.
    """

    def __init__(self, path: Path, own: LedgerShard, reader: SnapshotReader) -> None:
        self._path = path
        self._own = own
        self._reader = reader

    @classmethod
    async def open(cls, path: str | Path, *, create: bool) -> Self:
        """Open the ledger at `path`; with `create` it is made when there is none, without that is an error.

        Raises LedgerError when another live process writes to it, or when the file is of another version.
        """
        path = Path(path)
        own = await LedgerShard.open(path, create=create, kind=FileKind.COORDINATOR)
        try:
            files = await asyncio.to_thread(LedgerFiles, path)
        except BaseException:
            await own.aclose()
            raise
        return cls(path, own, SnapshotReader(files))

    async def aclose(self) -> None:
        """Commit what is queued, close the files and free the lock. Idempotent, and finished even when cancelled."""
        self._reader.stop()
        self._own.stop()
        await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        self._reader.close()  # first: the last connection to close folds the write-ahead log into its file
        fold(shard_paths(self._path).values())
        self._own.close()

    # -------------------------------------------------------------------------- sessions of its own: a Journal

    async def open_session(self, session: SessionRecord) -> None:
        await self._own.open_session(session)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        """Add a turn to an open session. The cost is that of its new tokens and messages, whatever the history."""
        await self._own.append_turn(session_id, turn)

    async def close_session(self, trajectory: Trajectory) -> None:
        """End a session. A trajectory for training waits from now on, whatever its status."""
        await self._own.close_session(trajectory)

    async def set_rewards(self, session_id: str, rewards: Rewards) -> None:
        """Replace what a waiting trajectory of its own (no shard's) has earned, after its end.

        One whose status is `missing_reward` is completed by it.
        """
        await self._reader.run(partial(questions.require_trainable, session_ids=[session_id], what="rewarded"))
        await self._own.run(
            partial(
                writes.set_late_rewards,
                session_id=session_id,
                rewards=encode_rewards(rewards),
                is_missing=rewards.is_missing,
            )
        )

    # ------------------------------------------------------------------------------------ starts and ends

    async def begin_incarnation(self, checkpoint_step: int | None) -> Incarnation:
        """Start a process of the run at the checkpoint of `checkpoint_step` (0: at the initial weights).

        None: at whatever step a trainer elsewhere is; what it has leased stays leased.

        Sessions that dead processes left open end as orphans, in every shard; leases up to the checkpoint are trained,
        for it may have been published and not yet committed; what came after it waits again. Call it first, before any
        worker writes: one that still does is an error, and nothing has happened.
        """
        orphans = await asyncio.to_thread(end_orphans_of, shard_paths(self._path).values())
        return await self._own.settle(
            partial(
                writes.begin_incarnation,
                checkpoint_step=checkpoint_step,
                num_orphans_of_shards=len(orphans),
                now_s=time.time(),
            )
        )

    def shard_path(self, shard_name: str) -> Path:
        """Where the shard of a worker lies, made or not."""
        return shard_path(self._path, shard_name)

    async def end_orphans(self, shard_name: str) -> tuple[str, ...]:
        """End what a worker that died left open in its shard, for example `w0`; the ids of those sessions.

        Call it before the worker is started again. Nothing has happened when it never made its shard.
        """
        path = shard_path(self._path, shard_name)
        return await asyncio.to_thread(end_orphans_of, [path] if path.is_file() else [])

    # ------------------------------------------------------------------------------ what becomes of trajectories

    async def lease(self, step: int, digests: Mapping[str, str], num_loss_tokens: Mapping[str, int]) -> None:
        """Lease waiting trajectories for train step `step`, all or none.

        Both mappings are by session id: `digest.lease_digest` of the trajectory, and how many of its tokens are in
        the loss.
        """
        if digests.keys() != num_loss_tokens.keys():
            odd = sorted(digests.keys() ^ num_loss_tokens.keys())
            raise LedgerError(f"a lease needs a digest and a number of loss tokens for every session; odd: {odd}")
        await self._reader.run(partial(questions.require_trainable, session_ids=tuple(digests), what="leased"))
        leases = [
            writes.Lease(session_id=session_id, digest=digest, num_loss_tokens=num_loss_tokens[session_id])
            for session_id, digest in digests.items()
        ]
        await self._own.run(partial(writes.lease, step=step, leases=leases))

    async def drop(self, drops: Mapping[str, Drop]) -> None:
        """Give waiting trajectories their fate, by session id, all or none. What is leased cannot be dropped.

        What is dropped for the same reason already stays so.
        """
        drops = await self._reader.run(partial(questions.droppable, drops=dict(drops)))
        await self._own.run(partial(writes.drop, drops=drops))

    async def commit_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint that contains every step up to `step` is published: what was leased for those is trained."""
        await self._own.run(partial(writes.commit_checkpoint, step=step, path=path))

    async def return_leases(self, after_step: int) -> int:
        """A trainer goes on from the checkpoint of `after_step`: what it leased later waits again; how many.

        What that checkpoint holds is trained: it may have been published and not yet committed.
        """
        return await self._own.run(partial(writes.return_leases, after_step=after_step))

    # -------------------------------------------------------------------------------------------- questions

    async def trajectory(self, session_id: str) -> Trajectory:
        """A closed session, with its turns and its fate."""
        return await self._reader.run(partial(questions.trajectory, session_id=session_id))

    async def waiting(self, limit: int | None = None) -> tuple[Trajectory, ...]:
        """What could be leased or dropped now, in the order of closing: the oldest `limit`, or all."""
        return await self._reader.run(partial(questions.waiting, limit=limit))

    async def num_waiting(self) -> int:
        """How many could be leased or dropped now. No trajectory is loaded."""
        return await self._reader.run(questions.num_waiting)

    async def leased(self, step: int) -> tuple[Trajectory, ...]:
        """What is leased for train step `step` and not yet trained."""
        return await self._reader.run(partial(questions.leased, step=step))

    async def siblings(self, group_ids: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """By group: the sessions of it that have ended for training, orphans left out. Reads through all sessions."""
        return await self._reader.run(partial(questions.siblings, group_ids=tuple(group_ids)))

    async def leased_groups(self) -> frozenset[str]:
        """The groups of which something is leased or trained. Reads through all sessions."""
        return await self._reader.run(questions.leased_groups)

    async def leases(self, after: int, up_to: int) -> Mapping[str, int]:
        """The step of each session that is leased or trained for one of the steps `after < step <= up_to`."""
        return await self._reader.run(partial(questions.leases, after=after, up_to=up_to))

    async def last_checkpoint(self, before: int | None = None) -> int:
        """The step of the newest checkpoint that is committed, or of those before a step; 0 when there is none."""
        return await self._reader.run(partial(questions.last_checkpoint, before=before))

    async def session_with_key(self, key_hash: str) -> str | None:
        """The id of the session, open or closed, that has this key; None when there is none."""
        return await self._reader.run(partial(questions.session_with_key, key_hash=key_hash))

    async def drawn_groups(self) -> Mapping[str, bool]:
        """By the id of a group for training: whether it was cut off, with nothing of it that has completed.

        Its process died, or the run ended before the group did, or before somebody trained it. Reads all sessions.
        """
        return await self._reader.run(questions.drawn_groups)

    async def counts(self) -> LedgerCounts:
        return await self._reader.run(questions.counts)

    async def count_tokens(self) -> tuple[int, int]:
        """Tokens sampled in training sessions, and loss tokens of the trajectories that are trained."""
        return await self._reader.run(questions.count_tokens)

    async def set_note(self, key: str, value: Any) -> None:
        """Keep a value of JSON's kinds about the run.

        `status` is read by `verify`: in a run that is `"completed"` nothing may be left over. It is `"running"` from
        `begin_incarnation` until it is set.
        """
        await self._own.run(partial(writes.set_note, key=key, text=encode_note(key, value)))

    async def get_note(self, key: str) -> Any:
        """The value that was set, or None."""
        return await self._reader.run(partial(questions.note, key=key))
