"""What is written of a session, in the file that it lives in. It knows nothing of what becomes of trajectories.

Plain functions over a connection; the caller owns the transaction. Each checks the rules before it writes, and raises
LedgerError when one would be broken.
"""

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from areal_agent.errors import LedgerError
from areal_agent.ledger import reads
from areal_agent.ledger.digest import row_digest
from areal_agent.ledger.encoding import CompletionRow, EndingRow, RewardRow, TurnRow
from areal_agent.types import SessionRecord, Status


def _insert(table: str, columns: Iterable[str]) -> str:
    names = tuple(columns)
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


_INSERT_TURN = _insert("turns", ("session", *TurnRow._fields))
_INSERT_COMPLETION = _insert("completions", ("turn", *CompletionRow._fields))
_INSERT_ENDING = _insert("endings", ("session", *EndingRow._fields, "digest"))
_REPLACE_ENDING = (
    f"UPDATE endings SET {', '.join(f'{name} = ?' for name in (*EndingRow._fields, 'digest'))} "
    "WHERE session = (SELECT number FROM sessions WHERE id = ?)"
)


def open_session(connection: sqlite3.Connection, session: SessionRecord) -> int:
    """The number of the session in its file."""
    cursor = connection.execute(
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
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def append_turn(
    connection: sqlite3.Connection,
    session_id: str,
    number: int | None,
    turn: TurnRow,
    completions: Iterable[CompletionRow],
) -> None:
    """`number` is that of the session, when it is known to be open."""
    session = number or _open_session_number(connection, session_id)
    turn_number = connection.execute(_INSERT_TURN, (session, *turn)).lastrowid
    for completion in completions:
        connection.execute(_INSERT_COMPLETION, (turn_number, *completion))


def close_session(connection: sqlite3.Connection, session_id: str, ending: EndingRow) -> None:
    session = _open_session_number(connection, session_id)
    connection.execute(_INSERT_ENDING, (session, *ending, row_digest(ending)))


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


def set_rewards(connection: sqlite3.Connection, session_id: str, rewards: RewardRow, *, is_missing: bool) -> None:
    """Replace what a session that has ended has earned. One that only lacked a reward is completed by it."""
    ending = reads.ending(connection, session_id)
    if ending is None:
        raise LedgerError(f"session {session_id!r} has not ended in this file: its rewards cannot be set")
    if not ending.is_as_written:
        raise LedgerError(
            f"the ending of session {session_id!r} is not as it was written: its rewards cannot be set; "
            "run `python -m areal_agent.ledger verify`"
        )
    row = ending.row._replace(**rewards._asdict())
    if row.status == Status.MISSING_REWARD and not is_missing:
        row = row._replace(status=Status.COMPLETED, error=None)
    connection.execute(_REPLACE_ENDING, (*row, row_digest(row), session_id))


class _Orphan(NamedTuple):
    number: int
    id: str
    ended_s: float


def end_orphans(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Close what is open, ended when its last answer did; the ids of those sessions."""
    found = connection.execute(
        "SELECT s.number, s.id, max(s.started_s, coalesce(max(t.ended_s), s.started_s)) "
        "FROM sessions s LEFT JOIN turns t ON t.session = s.number "
        "WHERE s.number NOT IN (SELECT session FROM endings) GROUP BY s.number"
    ).fetchall()
    orphans = [_Orphan(*row) for row in found]
    for orphan in orphans:
        ending = EndingRow(
            status=Status.ORPHAN,
            error="its process died before it ended",
            final_reward=None,
            rewards="{}",
            parts="{}",
            logged="{}",
            undelivered="[]",
            ended_s=orphan.ended_s,
        )
        connection.execute(_INSERT_ENDING, (orphan.number, *ending, row_digest(ending)))
    return tuple(orphan.id for orphan in orphans)
