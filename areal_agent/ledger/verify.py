"""Proves the invariants of a ledger, or names what breaks them. It reads one state of its files, also of a live run."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions, reads
from areal_agent.ledger.digest import lease_digest
from areal_agent.ledger.files import LedgerFiles, Snapshot
from areal_agent.ledger.invariants import Invariant, Violation
from areal_agent.ledger.records import LedgerCounts
from areal_agent.ledger.session_checks import CLOCK_SLACK_S, check_delivery, check_turns
from areal_agent.ledger.table_checks import check_files, check_finished, check_tables
from areal_agent.types import Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was looked at, and every breach that was found. `counts` is None when the file is too damaged to count."""

    counts: LedgerCounts | None
    num_turns: int
    num_sampled_tokens: int
    num_trained_tokens: int  # of trained trajectories, in the loss
    violations: tuple[Violation, ...]

    @property
    def is_ok(self) -> bool:
        return not self.violations

    def of(self, invariant: Invariant) -> tuple[Violation, ...]:
        """The breaches of one invariant."""
        return tuple(violation for violation in self.violations if violation.invariant is invariant)


def verify(path: Path, on_session: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check everything. `on_session` hears how many sessions are done, of how many.

    Raises LedgerError when a file cannot be opened at all; damage inside it is a violation.
    """
    examination = _Examination()
    with closing(LedgerFiles(path)) as files:
        try:
            with files.snapshot() as snapshot:
                examination.run(snapshot, on_session)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # even what SQLite says of a fault may hold the damage
            examination.add(Violation(invariant=Invariant.INTACT, subject="the files", detail=str(error)))
    return examination.report()


class _SessionRow(NamedTuple):
    number: int
    id: str
    started_s: float
    ended_s: float | None
    digest: str | None
    num_loss_tokens: int | None
    trained_step: int | None


class _Examination:
    """One pass over a ledger, and what it has found so far."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []
        self._counts: LedgerCounts | None = None
        self._num_turns = 0
        self._num_sampled_tokens = 0
        self._num_trained_tokens = 0

    def add(self, violation: Violation) -> None:
        self._violations.append(violation)

    def run(self, snapshot: Snapshot, on_session: Callable[[int, int], None] | None) -> None:
        self._violations += check_files(snapshot)
        self._check_sessions(snapshot, on_session or (lambda num_done, num_all: None))
        self._violations += check_tables(snapshot)
        self._counts = questions.counts(snapshot)
        self._violations += check_finished(snapshot, self._counts)

    def report(self) -> VerifyReport:
        return VerifyReport(
            counts=self._counts,
            num_turns=self._num_turns,
            num_sampled_tokens=self._num_sampled_tokens,
            num_trained_tokens=self._num_trained_tokens,
            violations=tuple(self._violations),
        )

    def _check_sessions(self, snapshot: Snapshot, on_session: Callable[[int, int], None]) -> None:
        num_all = sum(reads.number(connection, "count(*) FROM sessions") for connection in snapshot)
        sessions = ((connection, session) for connection in snapshot for session in _sessions_of(connection))
        for num_done, (connection, session) in enumerate(sessions, start=1):
            self._check_session(connection, session)
            on_session(num_done, num_all)

    def _check_session(self, connection: sqlite3.Connection, session: _SessionRow) -> None:
        try:
            self._check_readable(connection, session)
        except (LedgerError, TypeError, ValueError) as error:  # the latter: values of another type than their column's
            self.add(Violation(invariant=Invariant.READABLE, subject=f"session {session.id!r}", detail=str(error)))

    def _check_readable(self, connection: sqlite3.Connection, session: _SessionRow) -> None:
        trajectory = None if session.ended_s is None else reads.trajectory(connection, session.id)
        turns = reads.turns(connection, session.number) if trajectory is None else trajectory.turns
        self._num_turns += len(turns)
        num_sampled_tokens = sum(len(one.token_ids) for turn in turns for one in turn.completions)
        self._num_sampled_tokens += num_sampled_tokens
        if session.trained_step is not None:
            self._num_trained_tokens += session.num_loss_tokens or 0
        self._violations += check_turns(turns)
        self._violations += _check_span_of(session, turns)
        if trajectory is not None:
            self._violations += _check_ending(connection, session)
            self._violations += check_delivery(trajectory)
            self._violations += _check_lease(session, trajectory)


def _sessions_of(connection: sqlite3.Connection) -> Iterator[_SessionRow]:
    rows = connection.execute(
        "SELECT s.number, s.id, s.started_s, e.ended_s, l.digest, l.num_loss_tokens, f.trained_step "
        "FROM sessions s LEFT JOIN endings e ON e.session = s.number LEFT JOIN leases l ON l.session = s.id "
        "LEFT JOIN fates f ON f.session = s.id ORDER BY s.number"
    )
    yield from (_SessionRow(*row) for row in rows)


def _check_span_of(session: _SessionRow, turns: Sequence[Turn]) -> Iterator[Violation]:
    """The turns lie within their session's time."""
    subject = f"session {session.id!r}"
    first_s = min((turn.started_s for turn in turns), default=session.started_s)
    last_s = max((turn.ended_s for turn in turns), default=session.started_s)
    if first_s < session.started_s - CLOCK_SLACK_S:
        yield Violation(invariant=Invariant.TIMES, subject=subject, detail="a turn started before it did")
    if session.ended_s is not None and session.ended_s < last_s - CLOCK_SLACK_S:
        yield Violation(invariant=Invariant.TIMES, subject=subject, detail="it ended before one of its turns, or began")


def _check_ending(connection: sqlite3.Connection, session: _SessionRow) -> Iterator[Violation]:
    ending = reads.ending(connection, session.id)
    if ending is not None and not ending.is_as_written:
        detail = f"its status, rewards or what else ended it was changed since: its digest was {ending.digest!r:.14}..."
        yield Violation(invariant=Invariant.ENDED, subject=f"session {session.id!r}", detail=detail)


def _check_lease(session: _SessionRow, trajectory: Trajectory) -> Iterator[Violation]:
    if session.digest is None:
        return
    subject = f"session {session.id!r}"
    num_loss_tokens = session.num_loss_tokens or 0
    digest = lease_digest(trajectory, num_loss_tokens)
    if session.digest != digest:
        detail = (
            f"its lease has the digest {session.digest!r:.14}..., its tokens, rewards and {num_loss_tokens} tokens in "
            f"the loss have {digest!r:.14}..."
        )
        yield Violation(invariant=Invariant.SAMPLED, subject=subject, detail=detail)
    if not 0 < num_loss_tokens <= trajectory.num_sampled_tokens:
        detail = f"{session.num_loss_tokens} tokens in the loss of {trajectory.num_sampled_tokens} sampled"
        yield Violation(invariant=Invariant.SAMPLED, subject=subject, detail=detail)
