"""Pages of a ledger's rollouts, the newest first, for somebody who scrolls through them and filters.

A page looks at a bounded number of sessions of each file, so it costs as much in a ledger of a million turns as in a
small one. Where a filter leaves little of them a page may be short, or empty, without being the last.
"""

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import orjson

from areal_agent.errors import ConfigError, LedgerError
from areal_agent.ledger.encoding import DAMAGE
from areal_agent.ledger.files import Snapshot
from areal_agent.ledger.questions import (
    NUM_SAMPLED,
    OF_ROLLOUTS,
    TOTAL,
    RolloutSummary,
    number_in,
    summaries_in,
)
from areal_agent.types import SessionPurpose, Status, WeightVersion

SPAN = 5_000
"""A page looks at no more sessions of a file than this."""
NEAR = 500
"""Siblings are looked for among so many sessions before and after those of a page."""

_FATE = (
    f"CASE WHEN s.purpose = '{SessionPurpose.EVAL}' THEN 'evaluation' WHEN e.status IS NULL THEN 'open' "
    f"WHEN f.trained_step IS NOT NULL THEN 'trained' WHEN e.status = '{Status.ORPHAN}' THEN 'orphan' "
    "ELSE coalesce(f.dropped, CASE WHEN l.step IS NULL THEN 'waiting' ELSE 'leased' END) END"
)
_SAMPLED_BY = (
    "EXISTS (SELECT 1 FROM turns t JOIN completions c ON c.turn = t.number "
    "WHERE t.session = s.number AND c.versions LIKE '%:' || ? || '\"%')"
)
CONDITIONS: Mapping[str, tuple[type, str]] = {
    "purpose": (str, "s.purpose = ?"),
    "status": (str, "coalesce(e.status, 'open') = ?"),
    "fate": (str, f"? IN ({_FATE}, CASE WHEN f.dropped IS NOT NULL THEN 'dropped' END)"),
    "task": (str, "s.task_id = ?"),
    "group": (str, "s.group_id = ?"),
    "step": (int, "l.step = ?"),
    "version": (int, _SAMPLED_BY),
    "least_reward": (float, f"{TOTAL} >= ?"),
    "most_reward": (float, f"{TOTAL} <= ?"),
    "least_tokens": (int, f"{NUM_SAMPLED} >= ?"),
    "most_tokens": (int, f"{NUM_SAMPLED} <= ?"),
}
"""What rollouts can be filtered by: the type of the value, and its SQL. `version` is the step of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One rollout of a page, with the rewards of its siblings and the weights that sampled it."""

    rollout: RolloutSummary
    siblings: Mapping[str, float | None]  # rewards by session, itself among them
    versions: tuple[int, int] | None  # the first and last step of the weights; None: nothing was sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Rollouts, and where the next page begins: for each file the number of its next session, 0 at its end."""

    rollouts: Sequence[Listed]
    cursor: Sequence[int]


class _Place(NamedTuple):
    started_s: float
    number: int  # in its file
    session_id: str
    file: int


def num_sessions(snapshot: Snapshot) -> int:
    """The number of sessions in all files. Takes the same time for any number."""
    return sum(number_in(connection, "coalesce(max(number), 0) FROM sessions") for connection in snapshot)


def condition_of(filters: Mapping[str, str]) -> tuple[str, list[object]]:
    """The SQL of a filter by the names of `CONDITIONS`, and its values. Raises ConfigError for a wrong value."""
    values: list[object] = []
    for name, text in filters.items():
        kind = CONDITIONS[name][0]
        try:
            value = kind(text)
            if not (isinstance(value, str) or abs(value) < 2**63):  # an integer of SQLite's, or a number at all
                raise ValueError
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name} is {text!r:.80}; give {what}") from None
        values.append(value)
    return " AND ".join(["TRUE", *(CONDITIONS[name][1] for name in filters)]), values


def page(snapshot: Snapshot, filters: Mapping[str, str], cursor: Sequence[int], size: int) -> Page:
    """Return up to `size` rollouts from a cursor on; an empty cursor begins at the newest one.

    Between files the clock decides which is newer. Raises ConfigError for a wrong value of a filter.
    """
    condition, values = condition_of(filters)
    query = (
        f"SELECT s.started_s, s.number, s.id {OF_ROLLOUTS} s.number <= ? AND s.number > ? AND {condition} "
        "ORDER BY s.number DESC LIMIT ?"
    )
    newest = [number_in(connection, "coalesce(max(number), 0) FROM sessions") for connection in snapshot]
    tops = [*cursor, *newest[len(cursor) :]][: len(newest)]
    found = [
        [_Place(*row, file=file) for row in connection.execute(query, (top, top - SPAN, *values, size))]
        for file, (connection, top) in enumerate(zip(snapshot, tops, strict=True))
    ]
    taken = list(islice(heapq.merge(*found, key=itemgetter(0), reverse=True), size))
    numbers = [[one.number for one in taken if one.file == file] for file in range(len(tops))]
    ends = [
        (chosen[-1] - 1 if chosen else top) if len(chosen) < len(ones) or len(ones) == size else max(0, top - SPAN)
        for top, ones, chosen in zip(tops, found, numbers, strict=True)
    ]
    listed = _listed(snapshot, numbers, tops)
    return Page(rollouts=[listed[one.session_id] for one in taken], cursor=ends)


def _listed(snapshot: Snapshot, numbers: Sequence[Sequence[int]], tops: Sequence[int]) -> Mapping[str, Listed]:
    """Read the chosen sessions of each file, by id."""
    rollouts: dict[str, RolloutSummary] = {}
    versions: dict[str, list[int]] = {}
    for connection, chosen in zip(snapshot, numbers, strict=True):
        given = json.dumps(chosen)
        these = "s.number IN (SELECT value FROM json_each(?))"
        rollouts |= {one.session_id: one for one in summaries_in(connection, these, given)}
        for session_id, spans in connection.execute(
            "SELECT s.id, c.versions FROM sessions s JOIN turns t ON t.session = s.number "
            f"JOIN completions c ON c.turn = t.number WHERE {these}",
            (given,),
        ):
            try:
                steps = [WeightVersion.parse(version).step for version, *_ in orjson.loads(spans)]
            except DAMAGE as error:
                raise LedgerError(f"an answer of session {session_id!r} is damaged: {error}") from error
            versions.setdefault(session_id, []).extend(steps)
    siblings = _siblings(snapshot, {(one.group_id, one.task_id) for one in rollouts.values()}, numbers, tops)
    return {
        session_id: Listed(
            rollout=one,
            siblings=siblings[one.group_id, one.task_id],
            versions=(min(steps), max(steps)) if (steps := versions.get(session_id)) else None,
        )
        for session_id, one in rollouts.items()
    }


def _siblings(
    snapshot: Snapshot, groups: Iterable[tuple[str, str]], numbers: Sequence[Sequence[int]], tops: Sequence[int]
) -> Mapping[tuple[str, str], Mapping[str, float | None]]:
    """The rewards of the sessions of each group and task that were opened near those of a page, by session."""
    found: dict[tuple[str, str], dict[str, float | None]] = {group: {} for group in groups}
    group_ids = json.dumps([group_id for group_id, _ in found])
    for connection, chosen, top in zip(snapshot, numbers, tops, strict=True):
        first, last = min(chosen, default=top) - NEAR, max(chosen, default=top) + NEAR
        for group_id, task_id, session_id, reward in connection.execute(
            f"SELECT s.group_id, s.task_id, s.id, {TOTAL} FROM sessions s LEFT JOIN endings e ON e.session = s.number "
            "WHERE s.number BETWEEN ? AND ? AND s.group_id IN (SELECT value FROM json_each(?)) ORDER BY s.id",
            (first, last, group_ids),
        ):
            found.get((group_id, task_id), {})[session_id] = reward
    return found
