"""Functions over a snapshot of a whole ledger, whichever file a session is in. `Ledger.ask` calls them."""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

from areal_agent.errors import LedgerError
from areal_agent.ledger import reads
from areal_agent.ledger.encoding import decode_note
from areal_agent.ledger.files import Snapshot
from areal_agent.ledger.reads import LedgerCounts
from areal_agent.types import Drop, SessionPurpose, Status, Trajectory


def trajectory(snapshot: Snapshot, session_id: str) -> Trajectory:
    """The trajectory of a closed session. Raises LedgerError when the session is unknown or still open."""
    for connection in snapshot:
        found = reads.trajectory(connection, session_id)
        if found is not None:
            return found
    raise LedgerError(f"the ledger has no session {session_id!r}")


def waiting(snapshot: Snapshot, limit: int | None = None) -> tuple[Trajectory, ...]:
    """The oldest `limit` trajectories that wait (or all), in the order of closing; between files the clock decides."""
    query = f"SELECT e.ended_s, s.id {reads.WAITING} ORDER BY e.number"
    closed = heapq.merge(*(connection.execute(query) for connection in snapshot), key=itemgetter(0))
    return tuple(trajectory(snapshot, session_id) for _, session_id in islice(closed, limit))


def num_waiting(snapshot: Snapshot) -> int:
    """The number of waiting trajectories. None is loaded."""
    return sum(reads.number(connection, f"count(*) {reads.WAITING}") for connection in snapshot)


def leased(snapshot: Snapshot, step: int) -> tuple[Trajectory, ...]:
    """The trajectories leased for a step and not yet trained, in the order of session ids."""
    ids = snapshot[0].execute(
        "SELECT session FROM leases WHERE step = ? AND session NOT IN (SELECT session FROM fates) ORDER BY session",
        (step,),
    )
    return tuple(trajectory(snapshot, session_id) for (session_id,) in ids.fetchall())


def siblings(snapshot: Snapshot, group_ids: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """The ended training sessions of each group, without orphans, by group id. Scans all sessions."""
    found: dict[str, list[str]] = {group_id: [] for group_id in group_ids}
    for connection in snapshot:
        for group_id, session_id in connection.execute(
            "SELECT s.group_id, s.id FROM endings e JOIN sessions s ON s.number = e.session "
            f"WHERE s.purpose = '{SessionPurpose.TRAIN}' AND e.status != '{Status.ORPHAN}' "
            "AND s.group_id IN (SELECT value FROM json_each(?)) ORDER BY e.number",
            (json.dumps(list(found)),),
        ):
            found[group_id].append(session_id)
    return {group_id: tuple(session_ids) for group_id, session_ids in found.items()}


def leased_groups(snapshot: Snapshot) -> frozenset[str]:
    """The groups with at least one leased or trained session. Scans all sessions."""
    query = "SELECT DISTINCT group_id FROM sessions WHERE id IN (SELECT session FROM leases)"
    return frozenset(group_id for connection in snapshot for (group_id,) in connection.execute(query))


def leases(snapshot: Snapshot, after: int, up_to: int) -> Mapping[str, int]:
    """The step of each session that is leased or trained for a step with `after < step <= up_to`."""
    rows = snapshot[0].execute("SELECT session, step FROM leases WHERE step > ? AND step <= ?", (after, up_to))
    return dict(rows.fetchall())


def last_checkpoint(snapshot: Snapshot, before: int | None = None) -> int:
    """The step of the newest committed checkpoint, optionally before a given step; 0 when there is none."""
    rows = snapshot[0].execute(
        "SELECT coalesce(max(step), 0) FROM checkpoints WHERE step < ? OR ? IS NULL", (before,) * 2
    )
    return rows.fetchone()[0]


def session_with_key(snapshot: Snapshot, key_hash: str) -> str | None:
    """The id of the session with this key, or None."""
    for connection in snapshot:
        found = connection.execute("SELECT id FROM sessions WHERE key_hash = ?", (key_hash,)).fetchone()
        if found is not None:
            return found[0]
    return None


def require_trainable(snapshot: Snapshot, session_ids: Iterable[str], what: str) -> None:
    """Check that each session is for training and has ended, not as an orphan.

    Otherwise raises LedgerError: the session cannot be `what`.
    """
    for session_id in session_ids:
        objection = _objection(_standing(snapshot, session_id))
        if objection:
            raise LedgerError(f"session {session_id!r} cannot be {what}: {objection}")


def droppable(snapshot: Snapshot, drops: Mapping[str, Drop]) -> Mapping[str, Drop]:
    """The drops without those of orphans, whose status is their fate. Raises LedgerError if one cannot be dropped."""
    rest = {
        session_id: reason
        for session_id, reason in drops.items()
        if reason is not Drop.ORPHAN or not _is_dropped_orphan(_standing(snapshot, session_id))
    }
    require_trainable(snapshot, rest, "dropped")
    return rest


def _standing(snapshot: Snapshot, session_id: str) -> reads.Standing:
    for connection in snapshot:
        found = reads.standing(connection, session_id)
        if found is not None:
            return found
    raise LedgerError(f"the ledger has no session {session_id!r}")


def _is_dropped_orphan(standing: reads.Standing) -> bool:
    return standing == (SessionPurpose.TRAIN, Status.ORPHAN)


def _objection(standing: reads.Standing) -> str | None:
    if standing.purpose != SessionPurpose.TRAIN:
        return f"its purpose is {standing.purpose!r}, not 'train'"
    if standing.status is None:
        return "it is still open"
    if standing.status == Status.ORPHAN:
        return "its fate is dropped(orphan) already"
    return None


_GROUPS = (
    "SELECT group_id, max(is_cut_off), max(NOT is_cut_off AND is_completed) FROM ("
    "SELECT s.group_id, e.status = ? AS is_completed, e.status IS NULL OR e.status IN (?, ?) "
    "OR f.dropped IS ? OR (f.session IS NULL AND e.status != ?) AS is_cut_off "
    "FROM sessions s LEFT JOIN endings e ON e.session = s.number LEFT JOIN fates f ON f.session = s.id "
    "WHERE s.purpose = ?) GROUP BY group_id"
)
"""For each training group: whether one of its sessions was cut off, and whether another one completed.

A session was cut off when it is open, an orphan or cancelled, when it was left over at the end of the run, or when it
failed and has no fate, since its group would have given it one.
"""


def drawn_groups(snapshot: Snapshot) -> Mapping[str, bool]:
    """For each training group: whether it was cut off with no completed session, so that it is drawn again.

    A group is cut off when its process died, or when the run ended before the group did or was trained. Scans all
    sessions.
    """
    given = (Status.COMPLETED, Status.ORPHAN, Status.CANCELLED, Drop.ORPHAN, Status.COMPLETED, SessionPurpose.TRAIN)
    cut_off: set[str] = set()
    completed: dict[str, bool] = {}
    for connection in snapshot:
        for group_id, is_cut_off, is_completed in connection.execute(_GROUPS, given):
            completed[group_id] = completed.get(group_id, False) or bool(is_completed)
            if is_cut_off:
                cut_off.add(group_id)
    return {group_id: group_id in cut_off and not is_completed for group_id, is_completed in completed.items()}


def note(snapshot: Snapshot, key: str) -> Any:
    """The value of a note, or None."""
    found = snapshot[0].execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
    return None if found is None else decode_note(key, found[0])


def count_tokens(snapshot: Snapshot) -> tuple[int, int]:
    """The numbers of tokens sampled in training sessions, and of loss tokens in trained trajectories."""
    num_bytes = sum(
        reads.number(
            connection,
            "coalesce(sum(length(c.token_ids)), 0) FROM completions c JOIN turns t ON t.number = c.turn "
            f"JOIN sessions s ON s.number = t.session WHERE s.purpose = '{SessionPurpose.TRAIN}'",
        )
        for connection in snapshot
    )
    num_trained = reads.number(
        snapshot[0],
        "coalesce(sum(l.num_loss_tokens), 0) FROM leases l JOIN fates f ON f.session = l.session "
        "WHERE f.trained_step IS NOT NULL",
    )
    return num_bytes // 4, num_trained  # ids are int32


def counts(snapshot: Snapshot) -> LedgerCounts:
    def total(query: str) -> int:
        return sum(reads.number(connection, query) for connection in snapshot)

    coordinator = snapshot[0]
    statuses: Counter[str] = Counter()
    for connection in snapshot:
        statuses.update(reads.count_by(connection, "status", "endings"))
    return LedgerCounts(
        num_open=total("count(*) FROM sessions WHERE number NOT IN (SELECT session FROM endings)"),
        statuses=dict(statuses),
        num_eval=total(
            f"count(*) FROM endings e JOIN sessions s ON s.number = e.session WHERE s.purpose = '{SessionPurpose.EVAL}'"
        ),
        num_waiting=num_waiting(snapshot),
        num_leased=reads.number(coordinator, "count(*) FROM leases WHERE session NOT IN (SELECT session FROM fates)"),
        num_trained=reads.number(coordinator, "count(*) FROM fates WHERE trained_step IS NOT NULL"),
        drops=_drops(snapshot, total(f"count(*) {reads.DROPPED_ORPHANS}")),
    )


def _drops(snapshot: Snapshot, num_orphans: int) -> Mapping[str, int]:
    drops = Counter(reads.count_by(snapshot[0], "dropped", "fates"))
    if num_orphans:
        drops[Drop.ORPHAN] += num_orphans
    return dict(drops)
