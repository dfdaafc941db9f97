"""The ledger as everybody else uses it: asyncio calls over the files of a run.

`Ledger` writes what becomes of a trajectory, in whatever file its session is: waiting, leased, trained or dropped.
Every write checks the rules first and returns when it is durable. What is read is asked by a function of questions.py.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from areal_agent.ledger import questions, writes
from areal_agent.ledger.encoding import encode_note, encode_rewards
from areal_agent.ledger.files import FileKind, LedgerFiles, Snapshot, shard_path, shard_paths
from areal_agent.ledger.reads import Incarnation, Lease
from areal_agent.ledger.shard import LedgerShard, SnapshotReader, end_orphans_of, fold, upgrade_shards
from areal_agent.types import Drop, Rewards, Trajectory

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Ledger:
    """The one live writer of a run's bookkeeping, and of the sessions in the coordinator's file.

    ::

        ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
        await ledger.begin_incarnation(checkpoint_step=0)
        gateway = Gateway(journal=ledger.own, ...)
        waiting = await ledger.ask(questions.waiting, limit=8)
        ...
        await ledger.aclose()

    `own` is the coordinator's file: a `protocols.Journal` for a gateway in the same process. `ask` reads the sessions
    of every shard beside it, also of those that a worker makes later (`LedgerShard`). All methods raise LedgerError:
    for what would break a rule, when a file cannot be written, and once it is closed.
    """

    def __init__(self, path: Path, own: LedgerShard, reader: SnapshotReader) -> None:
        self._path = path
        self.own = own
        self._reader = reader

    @classmethod
    async def open(cls, path: str | Path, *, create: bool) -> Self:
        """Open the ledger at `path`; with `create` it is made when there is none, without that is an error.

        A ledger of an older version is upgraded, with all its shards. Raises LedgerError when another live process
        writes to it, or when a file is of a version that cannot be upgraded.
        """
        path = Path(path)
        own = await LedgerShard.open(path, create=create, kind=FileKind.COORDINATOR)
        try:
            await asyncio.to_thread(upgrade_shards, shard_paths(path).values())
            files = await asyncio.to_thread(LedgerFiles, path)
        except BaseException:
            await own.aclose()
            raise
        return cls(path, own, SnapshotReader(files))

    async def aclose(self) -> None:
        """Commit what is queued, close the files and free the lock. Idempotent, and finished even when cancelled."""
        self._reader.stop()
        self.own.writer.stop()
        await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        self._reader.close()  # first: the last connection to close folds the write-ahead log into its file
        fold(shard_paths(self._path).values())
        self.own.close()

    # ------------------------------------------------------------------------------------------- questions

    async def ask(
        self, question: Callable[Concatenate[Snapshot, Given], Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """The answer to a function of questions.py, from what is committed in all files now."""
        return await self._reader.run(lambda snapshot: question(snapshot, *args, **kwargs))

    async def trajectory(self, session_id: str) -> Trajectory:
        """A closed session, with its turns and its fate."""
        return await self.ask(questions.trajectory, session_id)

    async def session_with_key(self, key_hash: str) -> str | None:
        """The id of the session, open or closed, that has this key; None when there is none."""
        return await self.ask(questions.session_with_key, key_hash)

    # ------------------------------------------------------------------------------------ starts and ends

    async def begin_incarnation(self, checkpoint_step: int | None) -> Incarnation:
        """Start a process of the run at the checkpoint of `checkpoint_step` (0: at the initial weights).

        None: at whatever step a trainer elsewhere is; what it has leased stays leased.

        Sessions that dead processes left open end as orphans, in every shard; leases up to the checkpoint are trained,
        for it may have been published and not yet committed; what came after it waits again. Call it first, before any
        worker writes: one that still does is an error, and nothing has happened.
        """
        orphans = await asyncio.to_thread(end_orphans_of, shard_paths(self._path).values())
        return await self.own.writer.run(
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

    async def lease(self, step: int, leases: Sequence[Lease]) -> None:
        """Lease waiting trajectories for train step `step`, all or none."""
        await self.ask(questions.require_trainable, [one.session_id for one in leases], what="leased")
        await self.own.writer.run(partial(writes.lease, step=step, leases=leases))

    async def drop(self, drops: Mapping[str, Drop]) -> None:
        """Give waiting trajectories their fate, by session id, all or none. What is leased cannot be dropped.

        What is dropped for the same reason already stays so.
        """
        drops = await self.ask(questions.droppable, dict(drops))
        await self.own.writer.run(partial(writes.drop, drops=drops))

    async def commit_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint that contains every step up to `step` is published: what was leased for those is trained."""
        await self.own.writer.run(partial(writes.commit_checkpoint, step=step, path=path))

    async def return_leases(self, after_step: int) -> int:
        """A trainer goes on from the checkpoint of `after_step`: what it leased later waits again; how many.

        What that checkpoint holds is trained: it may have been published and not yet committed.
        """
        return await self.own.writer.run(partial(writes.return_leases, after_step=after_step))

    async def set_rewards(self, session_id: str, rewards: Rewards) -> None:
        """Replace what a waiting trajectory of the coordinator's file (no shard's) has earned, after its end.

        One whose status is `missing_reward` is completed by it.
        """
        await self.ask(questions.require_trainable, [session_id], what="rewarded")
        await self.own.writer.run(
            partial(
                writes.set_late_rewards,
                session_id=session_id,
                rewards=encode_rewards(rewards),
                is_missing=rewards.is_missing,
            )
        )

    async def set_note(self, key: str, value: Any) -> None:
        """Keep a value of JSON's kinds about the run.

        `status` is read by `verify`: in a run that is `"completed"` nothing may be left over. It is `"running"` from
        `begin_incarnation` until it is set.
        """
        await self.own.writer.run(partial(writes.set_note, key=key, text=encode_note(key, value)))
