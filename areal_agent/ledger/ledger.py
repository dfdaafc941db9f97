"""The ledger of a run: asyncio calls over all of its files.

`Ledger` records what becomes of each trajectory (waiting, leased, trained or dropped), whichever file its session is
in. Every write checks the rules first and returns once it is durable. Read by passing a function of `questions.py` to
`Ledger.ask`.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions, writes
from areal_agent.ledger.encoding import Lease, StepRecord, encode_note, encode_rewards, encode_step
from areal_agent.ledger.files import FileKind, LedgerFiles, Snapshot, require_intact, shard_path, shard_paths
from areal_agent.ledger.shard import LedgerShard, end_orphans_of, fold, upgrade_shards
from areal_agent.ledger.writes import Incarnation
from areal_agent.process import time_of_day_s
from areal_agent.types import Drop, Rewards, Trajectory

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Ledger:
    """The only live writer of a run's bookkeeping and of the sessions in the coordinator's file.

    ::

        ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
        await ledger.begin_incarnation(checkpoint_step=0)
        gateway = Gateway(journal=ledger.own, ...)
        waiting = await ledger.ask(questions.waiting, limit=8)
        ...
        await ledger.aclose()

    `own` is the coordinator's file: a `protocols.Journal` for a gateway in the same process. `ask` also reads every
    shard beside it, including those that workers create later (`LedgerShard`). All methods raise LedgerError when a
    rule would be broken, when a file cannot be written, and once the ledger is closed.
    """

    def __init__(self, path: Path, own: LedgerShard, files: LedgerFiles) -> None:
        self.path = path
        self.own = own
        self._files = files  # used by the reader thread, which never holds up a writer
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")
        self._is_closed = False

    @classmethod
    async def open(cls, path: str | Path, *, create: bool) -> Self:
        """Open the ledger at `path`. If there is none, `create` makes it; otherwise that is an error.

        A ledger of an older version is upgraded with all its shards. Raises LedgerError when another live process
        writes to it, or when a file's version cannot be upgraded; LedgerDamaged when one that is there is damaged.
        """
        path = Path(path)
        if not create:
            await asyncio.to_thread(require_intact, path)
        own = await LedgerShard.open(path, create=create, kind=FileKind.COORDINATOR)
        try:
            await asyncio.to_thread(upgrade_shards, shard_paths(path).values())
            files = await asyncio.to_thread(LedgerFiles, path)
        except BaseException:
            await own.aclose()
            raise
        return cls(path, own, files)

    async def aclose(self) -> None:
        """Commit what is queued, close the files and free the lock. Idempotent, and completed even when cancelled."""
        self._is_closed = True
        self.own.writer.stop()
        await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        self._reader.shutdown()
        self._files.close()  # before the writer: the last connection to close folds the write-ahead log into its file
        fold(shard_paths(self.path).values())
        self.own.close()

    # ------------------------------------------------------------------------------------------- questions

    async def ask(
        self, question: Callable[Concatenate[Snapshot, Given], Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Answer a function of `questions.py` from what is committed in all files now, in one consistent state."""
        if self._is_closed:
            raise LedgerError("the ledger is closed: nothing can be read any more; open it again")

        def answer() -> Result:
            try:
                with self._files.snapshot() as snapshot:
                    return question(snapshot, *args, **kwargs)
            except sqlite3.Error as error:
                raise LedgerError(
                    f"the ledger could not be read: {error}; run `python -m areal_agent.ledger verify`"
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._reader, answer)

    async def trajectory(self, session_id: str) -> Trajectory:
        """The trajectory of a closed session, with its turns and its fate."""
        return await self.ask(questions.trajectory, session_id)

    # ------------------------------------------------------------------------------------ starts and ends

    async def begin_incarnation(self, checkpoint_step: int | None, *, at_least: int = 0) -> Incarnation:
        """Record that a process of the run starts from the checkpoint of `checkpoint_step` (0: the initial weights).

        Call it first, before any worker writes; it raises LedgerError, with nothing changed, if one still does.
        Sessions that dead processes left open, in any shard, end as orphans. What was leased up to the checkpoint
        becomes trained, since the checkpoint may have been published but not committed here; what was leased later
        waits again. With None (the trainer runs elsewhere), all leases stay. Its number is the next one, and `at_least`
        that.
        """
        orphans = await asyncio.to_thread(end_orphans_of, shard_paths(self.path).values())
        return await self.own.writer.run(
            writes.begin_incarnation,
            checkpoint_step=checkpoint_step,
            num_orphans_of_shards=len(orphans),
            now_s=time_of_day_s(),
            at_least=at_least,
        )

    def shard_path(self, shard_name: str) -> Path:
        """The path of a worker's shard, whether it exists or not."""
        return shard_path(self.path, shard_name)

    async def end_orphans(self, shard_name: str) -> tuple[str, ...]:
        """End the sessions that a dead worker left open in its shard, for example `w0`, and return their ids.

        Call it before the worker is started again. It does nothing when the worker never made its shard.
        """
        path = shard_path(self.path, shard_name)
        return await asyncio.to_thread(end_orphans_of, [path] if path.is_file() else [])

    # ------------------------------------------------------------------------------ what becomes of trajectories

    async def lease(self, step: int, leases: Sequence[Lease]) -> None:
        """Lease waiting trajectories for train step `step`, all of them or none."""
        await self.ask(questions.require_trainable, [one.session_id for one in leases], what="leased")
        await self.own.writer.run(writes.lease, step=step, leases=leases)

    async def drop(self, drops: Mapping[str, Drop]) -> None:
        """Drop waiting trajectories, by session id, all of them or none. Leased ones cannot be dropped.

        A trajectory that was already dropped for the same reason stays so.
        """
        drops = await self.ask(questions.droppable, dict(drops))
        await self.own.writer.run(writes.drop, drops=drops)

    async def commit_checkpoint(self, step: int, path: str) -> None:
        """Record that the checkpoint of `step` is published: everything leased up to that step is now trained."""
        await self.own.writer.run(writes.commit_checkpoint, step=step, path=path)

    async def return_leases(self, after_step: int) -> int:
        """Return the leases of steps after `after_step`, where a trainer resumes; return their number.

        What was leased up to that step becomes trained, since its checkpoint may have been published but not committed.
        """
        return await self.own.writer.run(writes.return_leases, after_step=after_step)

    async def set_rewards(self, session_id: str, rewards: Rewards) -> None:
        """Replace the rewards of a waiting trajectory in the coordinator's file (not in a shard), after its end.

        A trajectory whose status is `missing_reward` becomes `completed`.
        """
        await self.ask(questions.require_trainable, [session_id], what="rewarded")
        await self.own.writer.run(
            writes.set_rewards, session_id=session_id, rewards=encode_rewards(rewards), is_missing=rewards.is_missing
        )

    async def set_trainer(self, process: int, trainer: Mapping[str, Any]) -> None:
        """Record how the trainer of a process of the run was set up."""
        await self.own.writer.run(writes.set_trainer, number=process, trainer=encode_note("trainer", trainer))

    async def record_step(self, step: StepRecord) -> None:
        """Record how a train step was made."""
        await self.own.writer.run(writes.record_step, row=encode_step(step))

    async def set_note(self, key: str, value: Any) -> None:
        """Keep a JSON value about the run.

        `verify` reads the note `status`: a run that is `"completed"` may leave nothing over. `begin_incarnation`
        sets it to `"running"`.
        """
        await self.own.writer.run(writes.set_note, key=key, text=encode_note(key, value))
