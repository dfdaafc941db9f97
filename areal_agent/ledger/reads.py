"""What each question asks of the tables. Plain functions over a connection; the caller owns the snapshot."""

import sqlite3
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from areal_agent.errors import LedgerError
from areal_agent.ledger.encoding import (
    CompletionRow,
    EndingRow,
    TurnRow,
    decode_fate,
    decode_note,
    decode_object,
    decode_rewards,
    decode_status,
    decode_turn,
)
from areal_agent.ledger.records import LedgerCounts
from areal_agent.types import SessionPurpose, Trajectory, Turn


def trajectory(connection: sqlite3.Connection, session_id: str) -> Trajectory:
    """Raises LedgerError when the session is unknown or still open."""
    found = connection.execute(
        "SELECT s.number, s.group_id, s.task_id, s.started_s, f.trained_step, f.dropped, e.number, "
        f"{', '.join('e.' + name for name in EndingRow._fields)} "
        "FROM sessions s LEFT JOIN endings e ON e.session = s.number LEFT JOIN fates f ON f.session = s.number "
        "WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    if found is None:
        raise LedgerError(f"the ledger has no session {session_id!r}")
    number, group_id, task_id, started_s, trained_step, dropped, ending, *columns = found
    if ending is None:
        raise LedgerError(f"session {session_id!r} is still open: it is no trajectory yet")
    row = EndingRow(*columns)
    return Trajectory(
        session_id=session_id,
        group_id=group_id,
        task_id=task_id,
        turns=turns(connection, number),
        rewards=decode_rewards(row),
        status=decode_status(row),
        error=row.error,
        logged=decode_object(row.logged),
        started_s=started_s,
        ended_s=row.ended_s,
        fate=decode_fate(trained_step, dropped),
    )


def turns(connection: sqlite3.Connection, session: int) -> tuple[Turn, ...]:
    """The turns of a session, by its number, in the order in which they were appended."""
    completion_rows = connection.execute(
        f"SELECT c.turn, {', '.join('c.' + name for name in CompletionRow._fields)} "
        "FROM turns t JOIN completions c ON c.turn = t.number WHERE t.session = ? ORDER BY t.number, c.number",
        (session,),
    )
    completions: Mapping[int, list[CompletionRow]] = {
        turn: [CompletionRow(*columns) for _, *columns in rows]
        for turn, rows in groupby(completion_rows, key=itemgetter(0))
    }
    turn_rows = connection.execute(
        f"SELECT number, {', '.join(TurnRow._fields)} FROM turns WHERE session = ? ORDER BY number", (session,)
    )
    return tuple(decode_turn(TurnRow(*columns), completions.get(number, ())) for number, *columns in turn_rows)


def waiting(connection: sqlite3.Connection) -> tuple[Trajectory, ...]:
    """Closed, for training, neither leased nor of any fate; in the order of closing."""
    ids = connection.execute(f"SELECT s.id {_WAITING} ORDER BY e.number", (SessionPurpose.TRAIN,)).fetchall()
    return tuple(trajectory(connection, session_id) for (session_id,) in ids)


def leased(connection: sqlite3.Connection, step: int) -> tuple[Trajectory, ...]:
    """Leased for a train step and not of any fate yet; in the order in which the sessions were opened."""
    ids = connection.execute(
        "SELECT s.id FROM leases l JOIN sessions s ON s.number = l.session WHERE l.step = ? "
        "AND l.session NOT IN (SELECT session FROM fates) ORDER BY s.number",
        (step,),
    ).fetchall()
    return tuple(trajectory(connection, session_id) for (session_id,) in ids)


def session_with_key(connection: sqlite3.Connection, key_hash: str) -> str | None:
    """The id of the session that has this key; None when there is none."""
    found = connection.execute("SELECT id FROM sessions WHERE key_hash = ?", (key_hash,)).fetchone()
    return None if found is None else found[0]


_WAITING = (
    "FROM endings e JOIN sessions s ON s.number = e.session WHERE s.purpose = ? "
    "AND s.number NOT IN (SELECT session FROM leases) AND s.number NOT IN (SELECT session FROM fates)"
)


def next_group_number(connection: sqlite3.Connection) -> int:
    """One more than the highest number of a group id like `g000012`; 0 when there is none."""
    return connection.execute(
        "SELECT coalesce(max(CAST(substr(group_id, 2) AS INTEGER)) + 1, 0) FROM sessions "
        "WHERE group_id GLOB 'g[0-9]*' AND substr(group_id, 2) NOT GLOB '*[^0-9]*'"
    ).fetchone()[0]


def note(connection: sqlite3.Connection, key: str) -> Any:
    """None when it was never set."""
    found = connection.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
    return None if found is None else decode_note(key, found[0])


def count_tokens(connection: sqlite3.Connection) -> tuple[int, int]:
    sampled = connection.execute(
        "SELECT coalesce(sum(length(c.token_ids)), 0) FROM completions c JOIN turns t ON t.number = c.turn "
        "JOIN sessions s ON s.number = t.session WHERE s.purpose = ?",
        (SessionPurpose.TRAIN,),
    ).fetchone()[0]
    trained = connection.execute(
        "SELECT coalesce(sum(l.num_loss_tokens), 0) FROM leases l JOIN fates f ON f.session = l.session "
        "WHERE f.trained_step IS NOT NULL"
    ).fetchone()[0]
    return sampled // 4, trained  # ids are int32


def counts(connection: sqlite3.Connection) -> LedgerCounts:
    def one(query: str, *values: str) -> int:
        return connection.execute(query, values).fetchone()[0]

    statuses = connection.execute("SELECT status, count(*) FROM endings GROUP BY status").fetchall()
    drops = connection.execute(
        "SELECT dropped, count(*) FROM fates WHERE dropped IS NOT NULL GROUP BY dropped"
    ).fetchall()
    return LedgerCounts(
        num_open=one("SELECT count(*) FROM sessions WHERE number NOT IN (SELECT session FROM endings)"),
        statuses=dict(statuses),
        num_eval=one(
            "SELECT count(*) FROM endings e JOIN sessions s ON s.number = e.session WHERE s.purpose = ?",
            SessionPurpose.EVAL,
        ),
        num_waiting=one(f"SELECT count(*) {_WAITING}", SessionPurpose.TRAIN),
        num_leased=one("SELECT count(*) FROM leases WHERE session NOT IN (SELECT session FROM fates)"),
        num_trained=one("SELECT count(*) FROM fates WHERE trained_step IS NOT NULL"),
        drops=dict(drops),
    )
