"""What is written of what becomes of trajectories, all in the coordinator's file. It knows no session's file.

Leases, fates, checkpoints, incarnations, notes: plain functions over a connection; the caller owns the transaction.
Each checks the rules before it writes, and raises LedgerError when one would be broken. That a session has ended, and
is for training, is checked before (questions.py): that never changes again.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_agent.errors import LedgerError
from areal_agent.ledger.encoding import RewardRow, decode_fate, encode_note
from areal_agent.ledger.records import STATUS_NOTE, Incarnation
from areal_agent.ledger.session_writes import end_orphans, set_rewards
from areal_agent.types import Drop, Fate


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A trajectory that goes into a train step: what is trained of it."""

    session_id: str
    digest: str
    num_loss_tokens: int


def lease(connection: sqlite3.Connection, step: int, leases: Sequence[Lease]) -> None:
    """Lease them all or none."""
    newest = connection.execute("SELECT max(step) FROM checkpoints").fetchone()[0]
    if newest is not None and step <= newest:
        raise LedgerError(f"step {step} cannot be leased for: the checkpoint of step {newest} is committed already")
    for one in leases:
        _require_waiting(connection, one.session_id, "leased")
    connection.executemany(
        "INSERT INTO leases (session, step, digest, num_loss_tokens) VALUES (?, ?, ?, ?)",
        [(one.session_id, step, one.digest, one.num_loss_tokens) for one in leases],
    )


def drop(connection: sqlite3.Connection, drops: Mapping[str, Drop]) -> None:
    """Drop them all or none. What is dropped for that reason already stays so."""
    for session_id, reason in drops.items():
        if _fate(connection, session_id) != Fate(dropped=reason):
            _require_waiting(connection, session_id, "dropped")
            connection.execute("INSERT INTO fates (session, dropped) VALUES (?, ?)", (session_id, reason))


def set_late_rewards(connection: sqlite3.Connection, session_id: str, rewards: RewardRow, *, is_missing: bool) -> None:
    """Of a session in this file, while nothing has become of it."""
    _require_waiting(connection, session_id, "rewarded")
    set_rewards(connection, session_id, rewards, is_missing=is_missing)


def _require_waiting(connection: sqlite3.Connection, session_id: str, what: str) -> None:
    fate = _fate(connection, session_id)
    if fate is not None:
        raise LedgerError(f"session {session_id!r} cannot be {what}: its fate is {fate} already")
    leased = connection.execute("SELECT step FROM leases WHERE session = ?", (session_id,)).fetchone()
    if leased is not None:
        raise LedgerError(f"session {session_id!r} cannot be {what}: it is leased for step {leased[0]}")


def _fate(connection: sqlite3.Connection, session_id: str) -> Fate | None:
    found = connection.execute("SELECT trained_step, dropped FROM fates WHERE session = ?", (session_id,)).fetchone()
    return None if found is None else decode_fate(*found)


def commit_checkpoint(connection: sqlite3.Connection, step: int, path: str | None) -> None:
    """What is leased for steps up to `step` is trained now. A second time changes nothing but a path once unknown."""
    connection.execute(
        "INSERT INTO checkpoints (step, path) VALUES (?, ?) "
        "ON CONFLICT (step) DO UPDATE SET path = coalesce(excluded.path, path)",
        (step, path),
    )
    connection.execute(
        "INSERT INTO fates (session, trained_step) SELECT session, step FROM leases "
        "WHERE step <= ? AND session NOT IN (SELECT session FROM fates)",
        (step,),
    )


def begin_incarnation(
    connection: sqlite3.Connection, checkpoint_step: int | None, num_orphans_of_shards: int, now_s: float
) -> Incarnation:
    """Settle what the process before left behind, and count a new one. Without a step, all leases stand."""
    num_orphans = num_orphans_of_shards + len(end_orphans(connection))
    num_returned = 0 if checkpoint_step is None else return_leases(connection, checkpoint_step)
    if checkpoint_step is None:
        checkpoint_step = connection.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0]
    number = connection.execute("SELECT coalesce(max(number) + 1, 0) FROM incarnations").fetchone()[0]
    connection.execute(
        "INSERT INTO incarnations (number, checkpoint_step, started_s, num_orphans, num_returned) "
        "VALUES (?, ?, ?, ?, ?)",
        (number, checkpoint_step, now_s, num_orphans, num_returned),
    )
    set_note(connection, STATUS_NOTE, encode_note(STATUS_NOTE, "running"))
    return Incarnation(number=number, num_orphans=num_orphans, num_returned=num_returned)


def return_leases(connection: sqlite3.Connection, after_step: int) -> int:
    """Go on from the checkpoint of `after_step`: what it holds is trained, what was leased later waits again; how many.

    Fates of later steps are there only when a later checkpoint was committed and then lost or given up.
    """
    if after_step > 0:
        commit_checkpoint(connection, after_step, path=None)
    connection.execute("DELETE FROM checkpoints WHERE step > ?", (after_step,))
    connection.execute("DELETE FROM fates WHERE trained_step > ?", (after_step,))
    return connection.execute("DELETE FROM leases WHERE step > ?", (after_step,)).rowcount


def set_note(connection: sqlite3.Connection, key: str, text: str) -> None:
    connection.execute(
        "INSERT INTO notes (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, text),
    )
