"""Functions over a snapshot of a whole ledger, whichever file a session is in. `Ledger.ask` calls them.

Those at the end read one file through a connection that also sees the bookkeeping.
"""

import difflib
import heapq
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from areal_agent.errors import LedgerError
from areal_agent.ledger.encoding import (
    CompletionRow,
    EndingRow,
    StepRecord,
    StepRow,
    TurnRow,
    decode_fate,
    decode_note,
    decode_object,
    decode_rewards,
    decode_status,
    decode_step,
    decode_strings,
    decode_turn,
    row_digest,
)
from areal_agent.ledger.files import NO_DIGEST, Snapshot
from areal_agent.types import Drop, Fate, Rewards, SessionPurpose, SessionRecord, Status, Trajectory, Turn, role_of

Result = TypeVar("Result")

STATUS_NOTE = "status"
"""The note that holds the state of the run: `running`, `interrupted`, `failed` or `completed`."""

_WAITING = (
    "FROM endings e JOIN sessions s ON s.number = e.session "
    f"WHERE s.purpose = '{SessionPurpose.TRAIN}' AND e.status != '{Status.ORPHAN}' "
    "AND s.id NOT IN (SELECT session FROM leases) AND s.id NOT IN (SELECT session FROM fates)"
)
"""Selects training sessions that are closed and have neither a lease nor a fate. An orphan's status is its fate."""


def trajectory(snapshot: Snapshot, session_id: str) -> Trajectory:
    """The trajectory of a closed session. Raises LedgerError when the session is unknown or still open."""
    return _of_session(snapshot, trajectory_in, session_id)


def roles_of(snapshot: Snapshot, session_id: str) -> Sequence[str]:
    """The sessions of a rollout's other roles, SESSION/ROLE, in order."""
    query = "SELECT id, group_id FROM sessions WHERE id > ? || '/' AND id < ? || '0' ORDER BY id"  # 0 comes after /
    found = (row for connection in snapshot for row in connection.execute(query, (session_id, session_id)))
    return [one for one, group_id in found if role_of(one, group_id)]


def rollout(snapshot: Snapshot, session_id: str) -> tuple[Trajectory, ...]:
    """The trajectory of a closed session, and those of its rollout's other roles. Raises LedgerError as above."""
    return tuple(trajectory(snapshot, one) for one in (session_id, *roles_of(snapshot, session_id)))


def _of_session(
    snapshot: Snapshot, read: Callable[[sqlite3.Connection, str], Result | None], session_id: str
) -> Result:
    for connection in snapshot:
        found = read(connection, session_id)
        if found is not None:
            return found
    raise LedgerError(f"the ledger has no session {session_id!r}")


def waiting(snapshot: Snapshot, limit: int | None = None) -> tuple[Trajectory, ...]:
    """The oldest `limit` trajectories that wait (or all), in the order of closing; between files the clock decides."""
    query = f"SELECT e.ended_s, s.id {_WAITING} ORDER BY e.number"
    closed = heapq.merge(*(connection.execute(query) for connection in snapshot), key=itemgetter(0))
    return tuple(trajectory(snapshot, session_id) for _, session_id in islice(closed, limit))


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
    return _first(snapshot, "SELECT id FROM sessions WHERE key_hash = ?", key_hash)


def _first(snapshot: Snapshot, query: str, given: str) -> Any:
    """The value that the first file with one has, or None."""
    rows = (connection.execute(query, (given,)).fetchone() for connection in snapshot)
    return next((row[0] for row in rows if row is not None), None)


def require_trainable(snapshot: Snapshot, session_ids: Iterable[str], what: str) -> None:
    """Check that each session is for training and has ended, not as an orphan.

    Otherwise raises LedgerError: the session cannot be `what`.
    """
    for session_id in session_ids:
        match _of_session(snapshot, standing_in, session_id):
            case SessionPurpose.TRAIN, None:
                objection = "it is still open"
            case SessionPurpose.TRAIN, Status.ORPHAN:
                objection = "its fate is dropped(orphan) already"
            case SessionPurpose.TRAIN, _:
                continue
            case purpose, _:
                objection = f"its purpose is {purpose!r}, not 'train'"
        raise LedgerError(f"session {session_id!r} cannot be {what}: {objection}")


def droppable(snapshot: Snapshot, drops: Mapping[str, Drop]) -> Mapping[str, Drop]:
    """The drops without those of orphans, whose status is their fate. Raises LedgerError if one cannot be dropped."""
    orphan = (SessionPurpose.TRAIN, Status.ORPHAN)
    rest = {
        session_id: reason
        for session_id, reason in drops.items()
        if reason is not Drop.ORPHAN or _of_session(snapshot, standing_in, session_id) != orphan
    }
    require_trainable(snapshot, rest, "dropped")
    return rest


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
        for name, is_cut_off, is_completed in connection.execute(_GROUPS, given):
            group_id = name.partition("/")[0]  # roles have groups of their own, GROUP/ROLE
            completed[group_id] = completed.get(group_id, False) or bool(is_completed)
            if is_cut_off:
                cut_off.add(group_id)
    return {group_id: group_id in cut_off and not is_completed for group_id, is_completed in completed.items()}


def note(snapshot: Snapshot, key: str) -> Any:
    """The value of a note, or None."""
    found = snapshot[0].execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
    return None if found is None else decode_note(key, found[0])


CLAIM_NOTE = "claimed_incarnation"
"""The note that holds the incarnation that this process, or one that the ledger was restored after, has claimed."""


def newest_incarnation(snapshot: Snapshot) -> int:
    """The newest incarnation that the ledger knows to have begun or to be about to; -1 when there is none."""
    begun = number_in(snapshot[0], "coalesce(max(number), -1) FROM incarnations")
    claimed: int | None = note(snapshot, CLAIM_NOTE)
    return begun if claimed is None else max(begun, claimed)


def trainers(snapshot: Snapshot) -> Mapping[int, Mapping[str, Any]]:
    """How the trainer of each process of the run was set up, by the process's number."""
    rows = snapshot[0].execute("SELECT number, trainer FROM incarnations WHERE trainer IS NOT NULL ORDER BY number")
    return {number: decode_object(trainer) for number, trainer in rows}


def step_numbers(snapshot: Snapshot) -> Sequence[int]:
    """The steps of the living lineage whose making is recorded, in order."""
    return [step for (step,) in snapshot[0].execute("SELECT step FROM steps ORDER BY step")]


def step_record(snapshot: Snapshot, step: int) -> StepRecord:
    """How a step was made. Raises LedgerError when that is not recorded."""
    row = snapshot[0].execute(f"SELECT {', '.join(StepRow._fields)} FROM steps WHERE step = ?", (step,)).fetchone()
    if row is None:
        raise LedgerError(f"the ledger does not say how step {step} was made")
    return decode_step(StepRow(*row))


def lease_of(snapshot: Snapshot, session_id: str) -> tuple[str, int] | None:
    """The digest of a session's lease and its number of loss tokens; None when it has none in this ledger."""
    query = "SELECT digest, num_loss_tokens FROM leases WHERE session = ?"
    return snapshot[0].execute(query, (session_id,)).fetchone()


def num_ended(snapshot: Snapshot) -> int:
    """The number of rollouts that have ended, those for evaluation included."""
    return sum(number_in(connection, "coalesce(max(number), 0) FROM main.endings") for connection in snapshot)


def count_tokens(snapshot: Snapshot) -> tuple[int, int]:
    """The numbers of tokens sampled in training sessions, and of loss tokens in trained trajectories."""
    num_bytes = sum(
        number_in(
            connection,
            "coalesce(sum(length(c.token_ids)), 0) FROM completions c JOIN turns t ON t.number = c.turn "
            f"JOIN sessions s ON s.number = t.session WHERE s.purpose = '{SessionPurpose.TRAIN}'",
        )
        for connection in snapshot
    )
    num_trained = number_in(
        snapshot[0],
        "coalesce(sum(l.num_loss_tokens), 0) FROM leases l JOIN fates f ON f.session = l.session "
        "WHERE f.trained_step IS NOT NULL",
    )
    return num_bytes // 4, num_trained  # ids are int32


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
    def fates(self) -> str:
        """What became of training trajectories, in words."""
        drops = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.drops.items()))
        return (
            f"{self.num_trained:,} trained, {sum(self.drops.values()):,} dropped{f' ({drops})' if drops else ''}; "
            f"{self.num_leased:,} leased, {self.num_waiting:,} waiting"
        )


_ENDED = "FROM endings e JOIN sessions s ON s.number = e.session WHERE s.purpose ="


def counts(snapshot: Snapshot) -> LedgerCounts:
    def total(query: str) -> int:
        return sum(number_in(connection, query) for connection in snapshot)

    coordinator = snapshot[0]
    statuses: Counter[str] = Counter()
    for connection in snapshot:
        statuses.update(_count_by(connection, "status", "endings"))
    drops = Counter(_count_by(coordinator, "dropped", "fates"))
    num_orphans = total(f"count(*) {_ENDED} '{SessionPurpose.TRAIN}' AND e.status = '{Status.ORPHAN}'")
    if num_orphans:
        drops[Drop.ORPHAN] += num_orphans
    return LedgerCounts(
        num_open=total("count(*) FROM sessions WHERE number NOT IN (SELECT session FROM endings)"),
        statuses=dict(statuses),
        num_eval=total(f"count(*) {_ENDED} '{SessionPurpose.EVAL}'"),
        num_waiting=total(f"count(*) {_WAITING}"),
        num_leased=number_in(coordinator, "count(*) FROM leases WHERE session NOT IN (SELECT session FROM fates)"),
        num_trained=number_in(coordinator, "count(*) FROM fates WHERE trained_step IS NOT NULL"),
        drops=dict(drops),
    )


def _count_by(connection: sqlite3.Connection, column: str, table: str) -> Mapping[str, int]:
    """The number of rows for each value of a column, without NULLs."""
    return dict(
        connection.execute(
            f"SELECT {column}, count(*) FROM {table} WHERE {column} IS NOT NULL GROUP BY {column}"
        ).fetchall()
    )


class TurnTime(NamedTuple):
    """When a turn of an ended session began and ended, in Unix seconds, and the tokens that it sampled."""

    session_id: str
    group_id: str
    purpose: str  # of `SessionPurpose`
    session_started_s: float
    session_ended_s: float
    started_s: float
    ended_s: float
    num_tokens: int


def turn_times(snapshot: Snapshot) -> Sequence[TurnTime]:
    """The times of all turns, each session's together and in the order of recording. Scans all sessions."""
    query = (
        "SELECT s.id, s.group_id, s.purpose, s.started_s, e.ended_s, t.started_s, t.ended_s, "
        "(SELECT coalesce(sum(length(c.token_ids)), 0) / 4 FROM completions c WHERE c.turn = t.number) "
        "FROM turns t JOIN sessions s ON s.number = t.session JOIN endings e ON e.session = s.number "
        "ORDER BY s.number, t.number"
    )
    return [TurnTime(*row) for connection in snapshot for row in connection.execute(query)]


# ------------------------------------------------------------------------------- what a person asks


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One session in a list: how it ended, what it earned and what became of it."""

    session_id: str
    group_id: str
    task_id: str
    purpose: str  # of `SessionPurpose`
    status: str | None  # of `Status`; None: it is open
    error: str | None
    leased_step: int | None  # of the train step that has it, or will have it
    num_loss_tokens: int | None  # of a session that was leased
    started_s: float
    ended_s: float | None
    num_turns: int
    num_sampled_tokens: int
    rewards: Rewards
    fate: Fate | None


OF_ROLLOUTS = (
    "FROM sessions s LEFT JOIN endings e ON e.session = s.number LEFT JOIN leases l ON l.session = s.id "
    "LEFT JOIN fates f ON f.session = s.id WHERE"
)
"""The tables of sessions `s` with their endings `e`, leases `l` and fates `f`."""
TOTAL = (
    f"CASE WHEN e.status = '{Status.COMPLETED}' THEN "
    "round(coalesce(e.final_reward, 0) + (SELECT coalesce(sum(value), 0) FROM json_each(e.rewards)), 12) END"
)
"""The SQL of `Rewards.total`, whose sum does not round; NULL for a session that did not complete."""
NUM_SAMPLED = (
    "(SELECT coalesce(sum(length(c.token_ids)), 0) / 4 FROM turns t JOIN completions c ON c.turn = t.number "
    "WHERE t.session = s.number)"
)
"""The SQL of the number of tokens that a session sampled."""


def group_ids(
    snapshot: Snapshot,
    purpose: SessionPurpose,
    *,
    step: int | None = None,
    only_failed: bool = False,
    lowest_first: bool = False,
) -> Sequence[str]:
    """The groups of a purpose: the newest first, or those of the lowest mean reward. Scans all sessions.

    With `step` only those leased or trained for it, and with `only_failed` those of rollouts that did not complete.
    """
    newest: dict[str, float] = {}
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for connection in snapshot:
        for group_id, started_s, reward in connection.execute(
            f"SELECT s.group_id, s.started_s, {TOTAL if lowest_first else 'NULL'} {OF_ROLLOUTS} s.purpose = ? "
            f"AND (? IS NULL OR l.step = ?) AND (e.status != '{Status.COMPLETED}' OR NOT ?)",
            (purpose, step, step, only_failed),
        ):
            newest[group_id] = max(started_s, newest.get(group_id, 0.0))
            if reward is not None:
                rewards[group_id].append(reward)
    if lowest_first:
        return sorted(rewards, key=lambda group_id: (fmean(rewards[group_id]), -newest[group_id]))
    return sorted(newest, key=newest.__getitem__, reverse=True)


def rewarded(snapshot: Snapshot, min_reward: float) -> Sequence[str]:
    """The completed training sessions with at least this reward in total, in the order of ids."""
    query = f"SELECT s.id, {TOTAL} AS reward {OF_ROLLOUTS} s.purpose = ? AND reward >= ?"
    given = (SessionPurpose.TRAIN, min_reward)
    return sorted(row[0] for connection in snapshot for row in connection.execute(query, given))


_SUMMARIES = (
    "SELECT s.id, s.group_id, s.task_id, s.purpose, e.status, e.error, l.step, l.num_loss_tokens, s.started_s, "
    "e.ended_s, (SELECT count(*) FROM turns t WHERE t.session = s.number), "
    f"{NUM_SAMPLED}, e.final_reward, coalesce(e.rewards, '{{}}'), coalesce(e.parts, '{{}}'), f.trained_step, f.dropped "
    f"{OF_ROLLOUTS}"
)


def rollouts_of(snapshot: Snapshot, groups: Iterable[str]) -> Mapping[str, Sequence[RolloutSummary]]:
    """The sessions of these groups by group, each group in the order of session ids. Scans all sessions."""
    found: dict[str, list[RolloutSummary]] = {group_id: [] for group_id in groups}
    for connection in snapshot:
        for one in summaries_in(connection, "s.group_id IN (SELECT value FROM json_each(?))", json.dumps(list(found))):
            found[one.group_id].append(one)
    return {group_id: sorted(ones, key=lambda one: one.session_id) for group_id, ones in found.items()}


def summaries_in(connection: sqlite3.Connection, condition: str, *given: object) -> Iterable[RolloutSummary]:
    """The sessions of one file that fulfil an SQL condition on the tables of `OF_ROLLOUTS`."""
    for row in connection.execute(f"{_SUMMARIES} {condition}", given):
        *columns, final, by_completion, parts, trained_step, dropped = row
        rewards = Rewards(final=final, by_completion=decode_object(by_completion), parts=decode_object(parts))
        _, _, _, purpose, status, *_ = columns
        yield RolloutSummary(*columns, rewards=rewards, fate=_fate(purpose, status, trained_step, dropped))


def siblings_of(snapshot: Snapshot, session_id: str) -> Sequence[RolloutSummary]:
    """The rollouts of the same group and task, itself among them; a group of an evaluation has many tasks."""
    group_id = group_of(snapshot, session_id) or ""
    rollouts = rollouts_of(snapshot, [group_id])[group_id]
    task_id = next((one.task_id for one in rollouts if one.session_id == session_id), None)
    return [one for one in rollouts if one.task_id == task_id]


def group_of(snapshot: Snapshot, session_id: str) -> str | None:
    """The group of a session, or None when there is no such session."""
    return _first(snapshot, "SELECT group_id FROM sessions WHERE id = ?", session_id)


def recorded(snapshot: Snapshot, session_id: str) -> tuple[tuple[Turn, ...], Trajectory | None]:
    """The turns of a session, and its trajectory once it has ended. Raises LedgerError when there is none."""
    return _of_session(snapshot, recorded_in, session_id)


def opened(snapshot: Snapshot, session_id: str) -> SessionRecord:
    """The start of a session. Raises LedgerError when there is none."""
    return _of_session(snapshot, _opened_in, session_id)


def session_ids(snapshot: Snapshot, limit: int) -> Sequence[str]:
    """The newest `limit` sessions of each file."""
    query = "SELECT id FROM sessions ORDER BY number DESC LIMIT ?"
    return [session_id for connection in snapshot for (session_id,) in connection.execute(query, (limit,))]


NUM_NEAR = 20_000
"""A misspelt name is compared with so many of the newest sessions of each file."""


def near_sessions(snapshot: Snapshot, name: str) -> Sequence[str]:
    """Up to three of the newest sessions whose ids resemble a name."""
    ids = session_ids(snapshot, NUM_NEAR)
    return difflib.get_close_matches(name, ids, n=3) or [one for one in ids if name in one][:3]


# ---------------------------------------------------------------------------------------- one file


def standing_in(connection: sqlite3.Connection, session_id: str) -> tuple[str, str | None] | None:
    """A session's purpose, and its status once it has ended; None when it is not in this file.

    Neither changes again, but for a late reward.
    """
    return connection.execute(
        "SELECT s.purpose, e.status FROM sessions s LEFT JOIN endings e ON e.session = s.number WHERE s.id = ?",
        (session_id,),
    ).fetchone()


def _opened_in(connection: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    row = connection.execute(
        "SELECT id, group_id, task_id, purpose, seed, key_hash, started_s FROM sessions WHERE id = ?", (session_id,)
    ).fetchone()
    if row is None:
        return None
    name, group_id, task_id, purpose, seed, key_hash, started_s = row
    return SessionRecord(
        id=name,
        group_id=group_id,
        task_id=task_id,
        purpose=SessionPurpose(purpose),
        seed=seed,
        key_hash=key_hash,
        started_s=started_s,
    )


def trajectory_in(connection: sqlite3.Connection, session_id: str) -> Trajectory | None:
    """The trajectory of a session, or None when it is not in this file. Raises LedgerError when it is still open."""
    found = recorded_in(connection, session_id)
    if found is None:
        return None
    if found[1] is None:
        raise LedgerError(f"session {session_id!r} is still open: it is no trajectory yet")
    return found[1]


def recorded_in(connection: sqlite3.Connection, session_id: str) -> tuple[tuple[Turn, ...], Trajectory | None] | None:
    """The turns of a session, and its trajectory once it has ended; None when it is not in this file."""
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
    turns = turns_in(connection, number)
    if ending is None:
        return turns, None
    row = EndingRow(*columns)
    status = decode_status(row)
    return turns, Trajectory(
        session_id=session_id,
        group_id=group_id,
        task_id=task_id,
        turns=turns,
        rewards=decode_rewards(row),
        status=status,
        error=row.error,
        logged=decode_object(row.logged),
        started_s=started_s,
        ended_s=row.ended_s,
        fate=_fate(purpose, status, trained_step, dropped),
        undelivered=decode_strings(row.undelivered),
    )


def _fate(purpose: str, status: str | None, trained_step: int | None, dropped: str | None) -> Fate | None:
    """The fate of a session. An orphan's status is its fate."""
    if (purpose, status) == (SessionPurpose.TRAIN, Status.ORPHAN):
        return Fate(dropped=Drop.ORPHAN)
    return decode_fate(trained_step, dropped)


class Ending(NamedTuple):
    """The stored ending of a session."""

    row: EndingRow
    digest: str  # NO_DIGEST when version 2 of the tables wrote it

    @property
    def is_altered(self) -> bool:
        """True when the digest proves that the ending was changed after it was written."""
        return self.digest not in (NO_DIGEST, row_digest(self.row))


def ending_in(connection: sqlite3.Connection, session_id: str) -> Ending | None:
    """The ending of a session, or None when it is not in this file or still open."""
    found = connection.execute(
        f"SELECT {', '.join('e.' + name for name in EndingRow._fields)}, e.digest "
        "FROM endings e JOIN sessions s ON s.number = e.session WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    return None if found is None else Ending(row=EndingRow(*found[:-1]), digest=found[-1])


def turns_in(connection: sqlite3.Connection, session: int) -> tuple[Turn, ...]:
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


def eval_endings(snapshot: Snapshot) -> Mapping[str, str]:
    """The status of every ended session that is for evaluation, by its id."""
    query = f"SELECT s.id, e.status {_ENDED} '{SessionPurpose.EVAL}' ORDER BY e.number"
    return {one: status for connection in snapshot for one, status in connection.execute(query)}


def number_in(connection: sqlite3.Connection, query: str) -> int:
    """The single number that `SELECT query` returns."""
    return connection.execute(f"SELECT {query}").fetchone()[0]
