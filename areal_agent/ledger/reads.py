"""Functions that read sessions, turns and endings from one file, and the records of the bookkeeping.

Each takes a connection that sees the file and the bookkeeping; the caller owns the snapshot.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Self

from areal_agent.errors import LedgerError
from areal_agent.ledger.encoding import (
    CompletionRow,
    EndingRow,
    TurnRow,
    decode_fate,
    decode_object,
    decode_rewards,
    decode_status,
    decode_strings,
    decode_turn,
    lease_digest,
    row_digest,
)
from areal_agent.ledger.files import NO_DIGEST
from areal_agent.types import Drop, Fate, SessionPurpose, Status, Trajectory, Turn

WAITING = (
    "FROM endings e JOIN sessions s ON s.number = e.session "
    f"WHERE s.purpose = '{SessionPurpose.TRAIN}' AND e.status != '{Status.ORPHAN}' "
    "AND s.id NOT IN (SELECT session FROM leases) AND s.id NOT IN (SELECT session FROM fates)"
)
"""Selects training sessions that are closed and have neither a lease nor a fate. An orphan's status is its fate."""

DROPPED_ORPHANS = (
    "FROM endings e JOIN sessions s ON s.number = e.session "
    f"WHERE s.purpose = '{SessionPurpose.TRAIN}' AND e.status = '{Status.ORPHAN}'"
)


class SessionHead(NamedTuple):
    """A session's identity, and whether it has ended."""

    number: int
    id: str
    group_id: str
    task_id: str
    purpose: str
    is_closed: int


def sessions(connection: sqlite3.Connection) -> Iterator[SessionHead]:
    """Yield all sessions in the order of opening."""
    for row in connection.execute(
        "SELECT s.number, s.id, s.group_id, s.task_id, s.purpose, e.number IS NOT NULL "
        "FROM sessions s LEFT JOIN endings e ON e.session = s.number ORDER BY s.number"
    ):
        yield SessionHead(*row)


class Standing(NamedTuple):
    """A session's purpose, and its status once it has ended. Neither changes again, but for a late reward."""

    purpose: str
    status: str | None


def standing(connection: sqlite3.Connection, session_id: str) -> Standing | None:
    """The standing of a session, or None when it is not in this file."""
    found = connection.execute(
        "SELECT s.purpose, e.status FROM sessions s LEFT JOIN endings e ON e.session = s.number WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    return None if found is None else Standing(*found)


def trajectory(connection: sqlite3.Connection, session_id: str) -> Trajectory | None:
    """The trajectory of a session, or None when it is not in this file. Raises LedgerError when it is still open."""
    found = connection.execute(
        "SELECT s.number, s.group_id, s.task_id, s.purpose, s.started_s, f.trained_step, f.dropped, e.number, "
        f"{', '.join('e.' + name for name in EndingRow._fields)} "
        "FROM sessions s LEFT JOIN endings e ON e.session = s.number LEFT JOIN fates f ON f.session = s.id "
        "WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    if found is None:
        return None
    number, group_id, task_id, purpose, started_s, trained_step, dropped, ending, *columns = found
    if ending is None:
        raise LedgerError(f"session {session_id!r} is still open: it is no trajectory yet")
    row = EndingRow(*columns)
    status = decode_status(row)
    is_dropped_orphan = status is Status.ORPHAN and purpose == SessionPurpose.TRAIN
    return Trajectory(
        session_id=session_id,
        group_id=group_id,
        task_id=task_id,
        turns=turns(connection, number),
        rewards=decode_rewards(row),
        status=status,
        error=row.error,
        logged=decode_object(row.logged),
        started_s=started_s,
        ended_s=row.ended_s,
        fate=Fate(dropped=Drop.ORPHAN) if is_dropped_orphan else decode_fate(trained_step, dropped),
        undelivered=decode_strings(row.undelivered),
    )


class Ending(NamedTuple):
    """The stored ending of a session."""

    row: EndingRow
    digest: str  # NO_DIGEST when version 2 of the tables wrote it

    @property
    def is_altered(self) -> bool:
        """True when the digest proves that the ending was changed after it was written."""
        return self.digest not in (NO_DIGEST, row_digest(self.row))


def ending(connection: sqlite3.Connection, session_id: str) -> Ending | None:
    """The ending of a session, or None when it is not in this file or still open."""
    found = connection.execute(
        f"SELECT {', '.join('e.' + name for name in EndingRow._fields)}, e.digest "
        "FROM endings e JOIN sessions s ON s.number = e.session WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    return None if found is None else Ending(row=EndingRow(*found[:-1]), digest=found[-1])


def turns(connection: sqlite3.Connection, session: int) -> tuple[Turn, ...]:
    """The turns of the session with this number, in the order of recording."""
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


def number(connection: sqlite3.Connection, query: str) -> int:
    """The single number that `SELECT query` returns."""
    return connection.execute(f"SELECT {query}").fetchone()[0]


def count_by(connection: sqlite3.Connection, column: str, table: str) -> Mapping[str, int]:
    """The number of rows for each value of a column, without NULLs."""
    return dict(
        connection.execute(
            f"SELECT {column}, count(*) FROM {table} WHERE {column} IS NOT NULL GROUP BY {column}"
        ).fetchall()
    )


STATUS_NOTE = "status"
"""The note that holds the state of the run: `running`, `interrupted`, `failed` or `completed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The ledger's record of one trajectory in a train step."""

    session_id: str
    digest: str
    num_loss_tokens: int

    @classmethod
    def of(cls, trajectory: Trajectory, num_loss_tokens: int) -> Self:
        """Make the lease of a trajectory. Takes milliseconds for a long one, to compute the digest."""
        digest = lease_digest(trajectory, num_loss_tokens)
        return cls(session_id=trajectory.session_id, digest=digest, num_loss_tokens=num_loss_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incarnation:
    """One process of a run, from its start to its end or crash. The first has number 0, each restart one more.

    >>> Incarnation(number=1, num_orphans=3, num_returned=16).number
    1
    """

    number: int
    num_orphans: int  # sessions that the previous process left open
    num_returned: int  # trajectories whose steps no checkpoint covers: they wait again


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """The numbers of trajectories by how they ended and what became of them.

    Every training trajectory is exactly one of waiting, leased, trained or dropped.
    """

    num_open: int  # sessions that have not ended
    statuses: Mapping[str, int]  # closed sessions by `Status`, those for evaluation included
    num_eval: int
    num_waiting: int
    num_leased: int
    num_trained: int
    drops: Mapping[str, int]  # by `Drop`

    @property
    def num_closed(self) -> int:
        return sum(self.statuses.values())

    @property
    def num_dropped(self) -> int:
        return sum(self.drops.values())
