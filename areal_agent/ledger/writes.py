"""What each write does to the tables. Plain functions over a connection; the caller owns the transaction.

Each checks the rules before it writes, and raises LedgerError when one would be broken.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from areal_agent.errors import LedgerError
from areal_agent.ledger.encoding import CompletionRow, EndingRow, RewardColumns, TurnRow, encode_note
from areal_agent.ledger.records import STATUS_NOTE, Incarnation
from areal_agent.types import Drop, SessionPurpose, SessionRecord, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A trajectory that goes into a train step: what is trained of it."""

    session_id: str
    digest: str
    num_loss_tokens: int


def open_session(connection: sqlite3.Connection, session: SessionRecord) -> None:
    connection.execute(
        "INSERT INTO sessions (id, group_id, task_id, purpose, seed, key_hash, started_s) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            session.id,
            session.group_id,
            session.task_id,
            session.purpose,
            session.seed,
            session.key_hash,
            session.started_s,
        ),
    )


_INSERT_TURN = f"INSERT INTO turns (session, {', '.join(TurnRow._fields)}) VALUES (?{', ?' * len(TurnRow._fields)})"
_INSERT_COMPLETION = (
    f"INSERT INTO completions (turn, {', '.join(CompletionRow._fields)}) VALUES (?{', ?' * len(CompletionRow._fields)})"
)
_INSERT_ENDING = (
    f"INSERT INTO endings (session, {', '.join(EndingRow._fields)}) VALUES (?{', ?' * len(EndingRow._fields)})"
)


def append_turn(
    connection: sqlite3.Connection, session_id: str, turn: TurnRow, completions: Iterable[CompletionRow]
) -> None:
    session = _open_session_number(connection, session_id)
    number = connection.execute(_INSERT_TURN, (session, *turn)).lastrowid
    connection.executemany(_INSERT_COMPLETION, [(number, *completion) for completion in completions])


def close_session(connection: sqlite3.Connection, session_id: str, ending: EndingRow) -> None:
    session = _open_session_number(connection, session_id)
    connection.execute(_INSERT_ENDING, (session, *ending))


def _open_session_number(connection: sqlite3.Connection, session_id: str) -> int:
    found = connection.execute(
        "SELECT s.number, e.number FROM sessions s LEFT JOIN endings e ON e.session = s.number WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    if found is None:
        raise LedgerError(f"the ledger has no session {session_id!r}: open it first")
    number, ending = found
    if ending is not None:
        raise LedgerError(f"session {session_id!r} has ended: nothing can be added to it")
    return number


def lease(connection: sqlite3.Connection, step: int, leases: Sequence[Lease]) -> None:
    """Lease them all or none."""
    newest = connection.execute("SELECT max(step) FROM checkpoints").fetchone()[0]
    if newest is not None and step <= newest:
        raise LedgerError(f"step {step} cannot be leased for: the checkpoint of step {newest} is committed already")
    rows = [
        (_waiting_session_number(connection, one.session_id), step, one.digest, one.num_loss_tokens) for one in leases
    ]
    connection.executemany("INSERT INTO leases (session, step, digest, num_loss_tokens) VALUES (?, ?, ?, ?)", rows)


def set_rewards(connection: sqlite3.Connection, session_id: str, rewards: RewardColumns, *, is_missing: bool) -> None:
    """Replace what a waiting trajectory has earned; one that only lacked a reward is completed by it."""
    number = _waiting_session_number(connection, session_id)
    connection.execute(
        "UPDATE endings SET final_reward = ?, rewards = ?, parts = ? WHERE session = ?", (*rewards, number)
    )
    if not is_missing:
        connection.execute(
            "UPDATE endings SET status = ?, error = NULL WHERE session = ? AND status = ?",
            (Status.COMPLETED, number, Status.MISSING_REWARD),
        )


def drop(connection: sqlite3.Connection, drops: Mapping[str, Drop]) -> None:
    """Drop them all or none."""
    rows = [(_waiting_session_number(connection, session_id), reason) for session_id, reason in drops.items()]
    connection.executemany("INSERT INTO fates (session, dropped) VALUES (?, ?)", rows)


class _Standing(NamedTuple):
    """All that decides whether a session may be leased or dropped."""

    number: int
    purpose: str
    ending: int | None
    leased_step: int | None
    has_fate: int
    trained_step: int | None
    dropped: str | None


def _waiting_session_number(connection: sqlite3.Connection, session_id: str) -> int:
    found = connection.execute(
        "SELECT s.number, s.purpose, e.number, l.step, f.session IS NOT NULL, f.trained_step, f.dropped "
        "FROM sessions s LEFT JOIN endings e ON e.session = s.number LEFT JOIN leases l ON l.session = s.number "
        "LEFT JOIN fates f ON f.session = s.number WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    if found is None:
        raise LedgerError(f"the ledger has no session {session_id!r}")
    standing = _Standing(*found)
    objection = _objection(standing)
    if objection:
        raise LedgerError(f"session {session_id!r} cannot be leased or dropped: {objection}")
    return standing.number


def _objection(standing: _Standing) -> str | None:
    if standing.purpose != SessionPurpose.TRAIN:
        return f"its purpose is {standing.purpose!r}, not 'train'"
    if standing.ending is None:
        return "it is still open"
    if standing.has_fate:
        how = f"trained({standing.trained_step})" if standing.dropped is None else f"dropped({standing.dropped})"
        return f"its fate is {how} already"
    if standing.leased_step is not None:
        return f"it is leased for step {standing.leased_step}"
    return None


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


def begin_incarnation(connection: sqlite3.Connection, checkpoint_step: int | None, now_s: float) -> Incarnation:
    """Settle what the process before left behind, and count a new one. Without a step, all leases stand."""
    num_orphans = _end_orphans(connection)
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
    """Go on from the checkpoint of `after_step`: what it holds is trained, what was leased later waits again."""
    if after_step > 0:
        commit_checkpoint(connection, after_step, path=None)
    return _return_later(connection, after_step)


def _end_orphans(connection: sqlite3.Connection) -> int:
    """Close what is open, ended when its last answer did; training data among it is dropped."""
    orphans = connection.execute(
        "SELECT s.number, s.purpose, max(s.started_s, coalesce(max(t.ended_s), s.started_s)) "
        "FROM sessions s LEFT JOIN turns t ON t.session = s.number "
        "WHERE s.number NOT IN (SELECT session FROM endings) GROUP BY s.number"
    ).fetchall()
    for number, purpose, ended_s in orphans:
        ending = EndingRow(
            status=Status.ORPHAN,
            error="its process died before it ended",
            final_reward=None,
            rewards="{}",
            parts="{}",
            logged="{}",
            ended_s=ended_s,
        )
        connection.execute(_INSERT_ENDING, (number, *ending))
        if purpose == SessionPurpose.TRAIN:
            connection.execute("INSERT INTO fates (session, dropped) VALUES (?, ?)", (number, Drop.ORPHAN))
    return len(orphans)


def _return_later(connection: sqlite3.Connection, checkpoint_step: int) -> int:
    """Undo the lineage after the checkpoint that the run resumes from: it no longer exists, so nothing trained it.

    Fates of later steps are there only when a later checkpoint was committed and then lost or given up.
    """
    connection.execute("DELETE FROM checkpoints WHERE step > ?", (checkpoint_step,))
    connection.execute("DELETE FROM fates WHERE trained_step > ?", (checkpoint_step,))
    return connection.execute("DELETE FROM leases WHERE step > ?", (checkpoint_step,)).rowcount


def set_note(connection: sqlite3.Connection, key: str, text: str) -> None:
    connection.execute(
        "INSERT INTO notes (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, text),
    )
