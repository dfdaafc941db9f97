"""Functions that write to one file: sessions and their turns; in the coordinator's also leases, fates, checkpoints.

Each takes a connection, and the caller owns the transaction. Each checks the rules before it writes and raises
LedgerError when one would be broken. Where a session must have ended and be for training, which never changes again,
`Ledger` has checked that before (questions.py).
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions
from areal_agent.ledger.encoding import (
    CompletionRow,
    EndingRow,
    Lease,
    RewardRow,
    StepRow,
    TurnRow,
    decode_fate,
    encode_note,
    row_digest,
)
from areal_agent.ledger.files import NO_DIGEST
from areal_agent.ledger.questions import STATUS_NOTE
from areal_agent.types import Drop, Fate, SessionRecord, Status

FATE_OF_STATUS: Mapping[Status, Drop] = {
    Status.MISSING_REWARD: Drop.MISSING_REWARD,
    Status.REJECTED: Drop.REJECTED,
    Status.INFRA: Drop.INFRA,
    Status.ERROR: Drop.ERROR,
    Status.TIMEOUT: Drop.ERROR,
    Status.CANCELLED: Drop.ORPHAN,
    Status.ORPHAN: Drop.ORPHAN,
}
"""The fate of a rollout that ended with nothing to train, for every status but `completed`."""


def _insert(table: str, columns: Iterable[str]) -> str:
    names = tuple(columns)
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


_SESSION_COLUMNS = ("id", "group_id", "task_id", "purpose", "seed", "key_hash", "started_s")
_INSERT_SESSION = _insert("sessions", _SESSION_COLUMNS)
_INSERT_TURN = _insert("turns", ("session", *TurnRow._fields))
_INSERT_COMPLETION = _insert("completions", ("turn", *CompletionRow._fields))
_INSERT_ENDING = _insert("endings", ("session", *EndingRow._fields, "digest"))
_REPLACE_ENDING = (
    f"UPDATE endings SET {', '.join(f'{name} = ?' for name in (*EndingRow._fields, 'digest'))} "
    "WHERE session = (SELECT number FROM sessions WHERE id = ?)"
)


def open_session(connection: sqlite3.Connection, session: SessionRecord) -> None:
    connection.execute(_INSERT_SESSION, [getattr(session, column) for column in _SESSION_COLUMNS])


def append_turn(
    connection: sqlite3.Connection, session_id: str, turn: TurnRow, completions: Iterable[CompletionRow]
) -> None:
    session = _open_session_number(connection, session_id)
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
    """Replace the rewards of an ended session in this file, while it waits; `missing_reward` becomes `completed`."""
    _require_waiting(connection, session_id, "rewarded")
    ending = questions.ending_in(connection, session_id)
    if ending is None:
        raise LedgerError(f"session {session_id!r} has not ended in this file: its rewards cannot be set")
    if ending.is_altered:
        raise LedgerError(
            f"the ending of session {session_id!r} was changed after it was written: its rewards cannot be set; "
            "run `python -m areal_agent.ledger verify`"
        )
    row = ending.row._replace(**rewards._asdict())
    if row.status == Status.MISSING_REWARD and not is_missing:
        row = row._replace(status=Status.COMPLETED, error=None)
    digest = NO_DIGEST if ending.digest == NO_DIGEST else row_digest(row)  # most of it stays as unproved as it was
    connection.execute(_REPLACE_ENDING, (*row, digest, session_id))


def end_orphans(connection: sqlite3.Connection) -> tuple[str, ...]:
    """End every open session as an orphan, at the end of its last answer, and return their ids."""
    orphans = connection.execute(
        "SELECT s.number, s.id, max(s.started_s, coalesce(max(t.ended_s), s.started_s)) "
        "FROM sessions s LEFT JOIN turns t ON t.session = s.number "
        "WHERE s.number NOT IN (SELECT session FROM endings) GROUP BY s.number"
    ).fetchall()
    for number, _, ended_s in orphans:
        ending = EndingRow(
            status=Status.ORPHAN,
            error="its process died before it ended",
            final_reward=None,
            rewards="{}",
            parts="{}",
            logged="{}",
            undelivered="[]",
            ended_s=ended_s,
        )
        connection.execute(_INSERT_ENDING, (number, *ending, row_digest(ending)))
    return tuple(session_id for _, session_id, _ in orphans)


def lease(connection: sqlite3.Connection, step: int, leases: Sequence[Lease]) -> None:
    """Lease trajectories for a step, all of them or none."""
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
    """Drop trajectories, all of them or none. One already dropped for the same reason stays so."""
    for session_id, reason in drops.items():
        if _fate(connection, session_id) != Fate(dropped=reason):
            _require_waiting(connection, session_id, "dropped")
            connection.execute("INSERT INTO fates (session, dropped) VALUES (?, ?)", (session_id, reason))


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
    """Turn leases up to `step` into fates. Repeating it only fills in a path that was unknown."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Incarnation:
    """One process of a run, from its start to its end or crash. The first has number 0, each restart one more.

    >>> Incarnation(number=1, num_orphans=3, num_returned=16).number
    1
    """

    number: int
    num_orphans: int  # sessions that the previous process left open
    num_returned: int  # trajectories whose steps no checkpoint covers: they wait again


def begin_incarnation(
    connection: sqlite3.Connection,
    checkpoint_step: int | None,
    num_orphans_of_shards: int,
    now_s: float,
    at_least: int,
) -> Incarnation:
    """Settle what the previous process left behind, and count a new incarnation. Without a step, all leases stay."""
    num_orphans = num_orphans_of_shards + len(end_orphans(connection))
    num_returned = 0 if checkpoint_step is None else return_leases(connection, checkpoint_step)
    if checkpoint_step is None:
        checkpoint_step = connection.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0]
    next_one = connection.execute("SELECT coalesce(max(number) + 1, 0) FROM incarnations").fetchone()[0]
    number = max(next_one, at_least)
    connection.execute(
        "INSERT INTO incarnations (number, checkpoint_step, started_s, num_orphans, num_returned) "
        "VALUES (?, ?, ?, ?, ?)",
        (number, checkpoint_step, now_s, num_orphans, num_returned),
    )
    set_note(connection, STATUS_NOTE, encode_note(STATUS_NOTE, "running"))
    return Incarnation(number=number, num_orphans=num_orphans, num_returned=num_returned)


def return_leases(connection: sqlite3.Connection, after_step: int) -> int:
    """Resume from the checkpoint of `after_step`: its leases become trained, and later ones are deleted and counted.

    Fates of later steps exist only when a later checkpoint was committed and then lost or given up.
    """
    if after_step > 0:
        commit_checkpoint(connection, after_step, path=None)
    connection.execute("DELETE FROM checkpoints WHERE step > ?", (after_step,))
    connection.execute("DELETE FROM fates WHERE trained_step > ?", (after_step,))
    connection.execute("DELETE FROM steps WHERE step > ?", (after_step,))
    return connection.execute("DELETE FROM leases WHERE step > ?", (after_step,)).rowcount


def set_trainer(connection: sqlite3.Connection, number: int, trainer: str) -> None:
    """Record how the trainer of an incarnation was set up."""
    connection.execute("UPDATE incarnations SET trainer = ? WHERE number = ?", (trainer, number))


def record_step(connection: sqlite3.Connection, row: StepRow) -> None:
    """Record how a step was made. A step that failed after this, and is made again, replaces it."""
    marks = ", ".join("?" * len(row))
    connection.execute(f"INSERT OR REPLACE INTO steps ({', '.join(row._fields)}) VALUES ({marks})", row)


def set_note(connection: sqlite3.Connection, key: str, text: str) -> None:
    connection.execute(
        "INSERT INTO notes (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, text),
    )
