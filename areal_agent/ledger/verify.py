"""Checks the invariants of a ledger and names every violation. It reads one snapshot of the files, even of a live run.

`check_files` and `check_tables` check tables within a file and across files, mostly by queries that find offenders;
`check_turns`, `check_delivery` and `check_completion` check the records of one session, `ImageCheck` their images.
"""

import heapq
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from areal_agent.errors import LedgerError
from areal_agent.images import IMAGES, PREFIX, ImageFolder, digests_in
from areal_agent.ledger import questions
from areal_agent.ledger.encoding import lease_digest, token_digest
from areal_agent.ledger.files import NO_DIGEST, TOKENS_ONLY, LedgerFiles, Snapshot
from areal_agent.ledger.questions import STATUS_NOTE, LedgerCounts
from areal_agent.types import Completion, ImageSpan, SessionPurpose, Status, Trajectory, Turn

LOGPROB_SLACK = 1e-4
"""A probability of 1 may come out slightly above 1 in float32."""

CLOCK_SLACK_S = 1.0
"""The clock may be set back a little during a run; larger differences are violations."""


class Invariant(StrEnum):
    """A promise of the ledger, in the words that `verify` prints."""

    INTACT = "the files are intact and every reference leads somewhere"
    UNIQUE = "a session and an answer are in one file only"
    READABLE = "every row can be decoded"
    ONE_FATE = "a closed training trajectory is exactly one of trained, dropped, leased, waiting"
    KNOWN = "leases and fates are of sessions that exist"
    TRAINED = "what is trained was leased for that step, and a committed checkpoint holds it"
    FINISHED = "a completed run leaves nothing open, waiting or leased"
    SAMPLED = "what was leased is what was sampled and earned, token by token"
    ENDED = "every ending, with its rewards, is as it was written"
    LENGTHS = "every sampled token has its log-probability"
    LOGPROBS = "log-probabilities are finite and not above 0"
    SPANS = "version spans cover every completion, and versions never go back"
    LINEAGE = "every turn continues an answer that was recorded before it"
    IMAGES = "every image of a message is kept whole, and has its own tokens in its prompt"
    DELIVERY = "what was never delivered is an answer of its session"
    TIMES = "what begins later is not recorded as earlier"


class Violation(NamedTuple):
    """A violated invariant: by what, and how."""

    invariant: Invariant
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.detail}"


_HAS_BOOKKEEPING = "(s.id IN (SELECT session FROM leases) OR s.id IN (SELECT session FROM fates))"

_IS_OF_DIGESTS = (
    "((SELECT dflt_value FROM pragma_table_info('endings') WHERE name = 'digest') IS NULL "
    f"OR e.number > (SELECT min(number) FROM endings WHERE digest != '{NO_DIGEST}'))"
)
"""True for an ending that must have a digest: its file was never upgraded, or an earlier ending in it has one."""

_OF_SESSIONS = (
    (
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is open, yet it is leased or has a fate' FROM sessions s "
        f"WHERE s.number NOT IN (SELECT session FROM endings) AND {_HAS_BOOKKEEPING}",
    ),
    (
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is for ' || s.purpose || ', yet it is leased or has a fate' FROM sessions s "
        f"WHERE s.purpose != '{SessionPurpose.TRAIN}' AND {_HAS_BOOKKEEPING}",
    ),
    (
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is an orphan, yet it is leased or has another fate' "
        "FROM sessions s JOIN endings e ON e.session = s.number "
        f"WHERE e.status = '{Status.ORPHAN}' AND {_HAS_BOOKKEEPING}",
    ),
    (
        Invariant.ENDED,
        "SELECT s.id, 'its ending has lost its digest' FROM sessions s JOIN endings e ON e.session = s.number "
        f"WHERE e.digest = '{NO_DIGEST}' AND {_IS_OF_DIGESTS}",
    ),
)
"""Queries for contradictions between a file of sessions and the bookkeeping: a session's id, and what is wrong."""

_OF_BOOKKEEPING = (
    (
        Invariant.ONE_FATE,
        "SELECT f.session, 'it is dropped(' || f.dropped || '), yet leased for step ' || l.step "
        "FROM fates f JOIN leases l ON l.session = f.session WHERE f.dropped IS NOT NULL",
    ),
    (
        Invariant.ONE_FATE,
        "SELECT session, 'its fate is neither trained nor dropped, or both' FROM fates "
        "WHERE (trained_step IS NULL) = (dropped IS NULL)",
    ),
    (
        Invariant.TRAINED,
        "SELECT f.session, 'it is trained(' || f.trained_step || '), yet ' || "
        "coalesce('leased for step ' || l.step, 'never leased') "
        "FROM fates f LEFT JOIN leases l ON l.session = f.session "
        "WHERE f.trained_step IS NOT NULL AND f.trained_step IS NOT l.step",
    ),
    (
        Invariant.TRAINED,
        "SELECT session, 'it is trained(' || trained_step || '), and the newest checkpoint is ' || "
        "coalesce('of step ' || (SELECT max(step) FROM checkpoints), 'none') "
        "FROM fates WHERE trained_step > coalesce((SELECT max(step) FROM checkpoints), -1)",
    ),
    (
        Invariant.TRAINED,
        "SELECT session, 'it is still leased for step ' || step || ', which a committed checkpoint holds' "
        "FROM leases WHERE step <= (SELECT max(step) FROM checkpoints) AND session NOT IN (SELECT session FROM fates)",
    ),
)
"""Queries for contradictions within the bookkeeping."""


def check_files(snapshot: Snapshot) -> Iterator[Violation]:
    """Run SQLite's own checks on each file."""
    for connection in snapshot:
        name = Path(connection.execute("PRAGMA database_list").fetchone()[2]).name
        for (message,) in connection.execute("PRAGMA main.integrity_check"):
            if message != "ok":
                yield Violation(Invariant.INTACT, name, message)
        for table, row, referred, _ in connection.execute("PRAGMA main.foreign_key_check"):
            yield Violation(
                Invariant.INTACT, f"row {row} of {table} in {name}", f"it refers to a missing row of {referred}"
            )


def check_tables(snapshot: Snapshot) -> Iterator[Violation]:
    """Check sessions, leases, fates and checkpoints against each other."""
    yield from _search(snapshot[0], _OF_BOOKKEEPING)
    for connection in snapshot:
        yield from _search(connection, _OF_SESSIONS)
    yield from _check_known(snapshot)
    yield from _check_unique(snapshot, "session", "sessions")
    yield from _check_unique(snapshot, "completion", "completions")


def _search(connection: sqlite3.Connection, searches: Iterable[tuple[Invariant, str]]) -> Iterator[Violation]:
    for invariant, query in searches:
        for session_id, detail in connection.execute(query):
            yield Violation(invariant, f"session {session_id!r}", detail)


def _check_known(snapshot: Snapshot) -> Iterator[Violation]:
    for what in ("leases", "fates"):
        for (session_id,) in snapshot[0].execute(f"SELECT session FROM {what}"):
            if not any(questions.standing_in(connection, session_id) for connection in snapshot):
                yield Violation(
                    Invariant.KNOWN, f"session {session_id!r}", f"it has a row in {what}, yet no file has the session"
                )


def _check_unique(snapshot: Snapshot, noun: str, table: str) -> Iterator[Violation]:
    """Merge the files' indexes, holding only one id per file in memory."""
    by_file = [connection.execute(f"SELECT id FROM {table} ORDER BY id") for connection in snapshot]
    for (earlier,), (later,) in pairwise(heapq.merge(*by_file)):
        if earlier == later:
            yield Violation(Invariant.UNIQUE, f"{noun} {later!r}", "several files have it")


def check_finished(snapshot: Snapshot, counts: LedgerCounts) -> Iterator[Violation]:
    """Check that a run whose status is completed has left nothing over."""
    try:
        status = questions.note(snapshot, STATUS_NOTE)
    except LedgerError as error:
        yield Violation(Invariant.READABLE, "the notes", str(error))
        return
    if status != "completed":
        return
    left_over = {"open": counts.num_open, "waiting": counts.num_waiting, "leased": counts.num_leased}
    for what, number in left_over.items():
        if number:
            yield Violation(Invariant.FINISHED, "the run", f"it is completed, yet {number} of its sessions are {what}")


def check_turns(turns: Sequence[Turn]) -> Iterator[Violation]:
    """Check the turns of one session, given in the order of recording."""
    yield from _check_lineage(turns)
    yield from _check_times(turns)
    for turn in turns:
        for completion in turn.completions:
            yield from check_completion(completion)


def check_delivery(trajectory: Trajectory) -> Iterator[Violation]:
    """Check that completions recorded as undelivered were sampled in this session."""
    sampled = {completion.id for turn in trajectory.turns for completion in turn.completions}
    for completion_id in trajectory.undelivered:
        if completion_id not in sampled:
            yield Violation(
                Invariant.DELIVERY,
                f"session {trajectory.session_id!r}",
                f"its undelivered completion {completion_id!r} is in none of its turns",
            )


def check_completion(completion: Completion) -> Iterator[Violation]:
    subject = f"completion {completion.id!r}"
    num_ids, num_logprobs = len(completion.token_ids), len(completion.logprobs)
    if num_ids != num_logprobs:
        yield Violation(Invariant.LENGTHS, subject, f"{num_ids} token ids, {num_logprobs} log-probabilities")
    for position, logprob in enumerate(completion.logprobs):
        if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK):
            yield Violation(Invariant.LOGPROBS, subject, f"the log-probability at {position} is {logprob}")
            break
    detail = _fault_of_spans(completion)
    if detail:
        yield Violation(Invariant.SPANS, subject, detail)


def _fault_of_spans(completion: Completion) -> str | None:
    end = 0
    for span in completion.versions:
        if span.start != end or span.end < span.start:
            return f"a span is [{span.start}, {span.end}) where the one before ends at {end}"
        end = span.end
    if end != len(completion.token_ids):
        return f"spans end at {end} of {len(completion.token_ids)} tokens"
    versions = [span.version for span in completion.versions]
    for earlier, later in pairwise(versions):
        if later < earlier:
            return f"version {later} follows {earlier}"
    return None


def _check_lineage(turns: Sequence[Turn]) -> Iterator[Violation]:
    path_lengths: dict[str, int] = {}  # by completion id: prompt and answer
    for turn in turns:
        detail = _fault_of_parent(turn, path_lengths)
        if detail:
            yield Violation(Invariant.LINEAGE, f"turn {turn.id!r}", detail)
        prompt_length = turn.fork_at + len(turn.new_prompt_ids)
        path_lengths |= {one.id: prompt_length + len(one.token_ids) for one in turn.completions}


def _fault_of_parent(turn: Turn, path_lengths: dict[str, int]) -> str | None:
    if turn.parent is not None and turn.parent not in path_lengths:
        return f"it continues {turn.parent!r}, which is in no earlier turn of its session"
    room = 0 if turn.parent is None else path_lengths[turn.parent]
    if not 0 <= turn.fork_at <= room:
        return f"it keeps {turn.fork_at} tokens of a path of {room}"
    return None


def _check_times(turns: Sequence[Turn]) -> Iterator[Violation]:
    ended_s: dict[str, float] = {}  # by completion id
    for turn in turns:
        parent_s = -math.inf if turn.parent is None else ended_s.get(turn.parent, -math.inf)
        for what, earlier_s, later_s in (
            ("it ended before it started", turn.started_s, turn.ended_s),
            ("it started before the answer that it continues", parent_s, turn.started_s),
        ):
            if later_s < earlier_s - CLOCK_SLACK_S:
                yield Violation(Invariant.TIMES, f"turn {turn.id!r}", f"{what}, by {earlier_s - later_s:.1f} s")
        ended_s |= {one.id: turn.ended_s for one in turn.completions}


class ImageCheck:
    """Checks the images that turns name: that their files are whole, what their tokens are, and who refers to them."""

    def __init__(self, folder: ImageFolder) -> None:
        self.num_bytes: dict[str, int] = {}  # by digest; 0 for one that is missing or damaged
        self._folder = folder
        self._pad: tuple[int, str] | None = None  # the id that stands for images, and the first turn that has one

    def check(self, turns: Sequence[Turn]) -> Iterator[Violation]:
        """Check the turns of one session, given in the order of recording."""
        paths: dict[str | None, Sequence[ImageSpan]] = {}  # by completion: the images up to its end
        for turn in turns:
            path = paths.get(turn.parent, ())
            details = [f"it cuts image {one.digest}" for one in path if one.start < turn.fork_at < one.end]
            details += self._faults_of_spans(turn)
            details = details or [*_faults_of_references(turn, path)]
            yield from (Violation(Invariant.IMAGES, f"turn {turn.id!r}", detail) for detail in details)
            if path or turn.images:
                paths |= dict.fromkeys((one.id for one in turn.completions), turn.images_of_prompt(path))
            for digest in dict.fromkeys(one.digest for one in turn.images if one.digest not in self.num_bytes):
                try:
                    self.num_bytes[digest] = len(self._folder.read(digest))
                except LedgerError as error:
                    self.num_bytes[digest] = 0
                    yield Violation(Invariant.IMAGES, f"turn {turn.id!r}", str(error))

    def _faults_of_spans(self, turn: Turn) -> Iterator[str]:
        end = 0
        for one in turn.images:
            if not end <= one.start < one.end <= len(turn.new_prompt_ids):
                yield (
                    f"an image has the tokens [{one.start}, {one.end}) of {len(turn.new_prompt_ids)}, where the one "
                    f"before ends at {end}"
                )
                return
            end = one.end
            ids = sorted(set(turn.new_prompt_ids[one.start : one.end]))
            self._pad = self._pad or (ids[0], turn.id)
            pad, first = self._pad
            if ids != [pad]:
                yield f"an image has the ids {ids!s:.60}, and in turn {first!r} it is {pad} that stands for images"


def _faults_of_references(turn: Turn, path: Sequence[ImageSpan]) -> Iterator[str]:
    """Compare the images of a prompt with those of its parent's path and the references in its own messages.

    Their order may differ: a template is given the results of calls in the order of the calls.
    """
    shown = Counter(one.digest for one in turn.images_of_prompt(path))
    said = Counter(one.digest for one in path) + Counter(digests_in(turn.request_delta))
    for digest in shown | said:
        if (num_said := said[digest]) != (num_shown := shown[digest]):
            yield f"its messages refer to {PREFIX}{digest} {num_said} times, and its prompt has it {num_shown} times"


@dataclass(kw_only=True, slots=True)
class VerifyReport:
    """The result of `verify`. `counts` is None when a file is too damaged to count."""

    counts: LedgerCounts | None = None
    num_turns: int = 0
    num_sampled_tokens: int = 0
    num_trained_tokens: int = 0  # loss tokens of trained trajectories
    num_images: int = 0  # different ones
    num_image_bytes: int = 0
    violations: tuple[Violation, ...] = ()
    unproved: Counter[Invariant] = field(default_factory=Counter[Invariant])
    """Sessions that version 2 wrote, which kept too little to prove the invariant."""

    @property
    def is_ok(self) -> bool:
        return not self.violations

    def of(self, invariant: Invariant) -> tuple[Violation, ...]:
        """The violations of one invariant."""
        return tuple(violation for violation in self.violations if violation.invariant is invariant)


def verify(path: Path, on_session: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check everything. `on_session` is called with the number of sessions done and their total.

    Raises LedgerError when a file cannot be opened at all; damage inside a file is a violation.
    """
    report = VerifyReport()
    images = ImageCheck(ImageFolder(path.parent / IMAGES))
    violations: list[Violation] = []
    with closing(LedgerFiles(path)) as files:
        try:
            with files.snapshot() as snapshot:
                violations.extend(_check_all(snapshot, report, images, on_session))
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's own error message may contain damaged bytes
            violations.append(Violation(Invariant.INTACT, "the files", str(error)))
    report.violations = tuple(violations)
    report.num_images, report.num_image_bytes = len(images.num_bytes), sum(images.num_bytes.values())
    return report


def _check_all(
    snapshot: Snapshot, report: VerifyReport, images: ImageCheck, on_session: Callable[[int, int], None] | None
) -> Iterator[Violation]:
    yield from check_files(snapshot)
    num_all = sum(questions.number_in(connection, "count(*) FROM sessions") for connection in snapshot)
    sessions = ((connection, session) for connection in snapshot for session in _sessions_of(connection))
    for num_done, (connection, session) in enumerate(sessions, start=1):
        try:
            yield from _check_session(connection, session, report, images)
        except (LedgerError, TypeError, ValueError) as error:  # a column's value may have the wrong type
            yield Violation(Invariant.READABLE, f"session {session.id!r}", str(error))
        if on_session is not None:
            on_session(num_done, num_all)
    yield from check_tables(snapshot)
    report.counts = questions.counts(snapshot)
    yield from check_finished(snapshot, report.counts)


class _SessionRow(NamedTuple):
    number: int
    id: str
    started_s: float
    ended_s: float | None
    digest: str | None  # of its lease
    num_loss_tokens: int | None
    trained_step: int | None


def _sessions_of(connection: sqlite3.Connection) -> Iterator[_SessionRow]:
    rows = connection.execute(
        "SELECT s.number, s.id, s.started_s, e.ended_s, l.digest, l.num_loss_tokens, f.trained_step "
        "FROM sessions s LEFT JOIN endings e ON e.session = s.number LEFT JOIN leases l ON l.session = s.id "
        "LEFT JOIN fates f ON f.session = s.id ORDER BY s.number"
    )
    yield from (_SessionRow(*row) for row in rows)


def _check_session(
    connection: sqlite3.Connection, session: _SessionRow, report: VerifyReport, images: ImageCheck
) -> Iterator[Violation]:
    trajectory = None if session.ended_s is None else questions.trajectory_in(connection, session.id)
    turns = questions.turns_in(connection, session.number) if trajectory is None else trajectory.turns
    report.num_turns += len(turns)
    report.num_sampled_tokens += sum(len(one.token_ids) for turn in turns for one in turn.completions)
    if session.trained_step is not None:
        report.num_trained_tokens += session.num_loss_tokens or 0
    yield from check_turns(turns)
    yield from images.check(turns)
    yield from _check_span_of(session, turns)
    if trajectory is not None:
        yield from _check_ending(connection, session, report)
        yield from check_delivery(trajectory)
        yield from _check_lease(session, trajectory, report)


def _check_ending(connection: sqlite3.Connection, session: _SessionRow, report: VerifyReport) -> Iterator[Violation]:
    ending = questions.ending_in(connection, session.id)
    assert ending is not None
    if ending.digest == NO_DIGEST:
        report.unproved[Invariant.ENDED] += 1
    if ending.is_altered:
        detail = f"its ending (status, rewards, ...) was changed after its digest {ending.digest!r:.14}... was written"
        yield Violation(Invariant.ENDED, f"session {session.id!r}", detail)


def _check_lease(session: _SessionRow, trajectory: Trajectory, report: VerifyReport) -> Iterator[Violation]:
    if session.digest is None:
        return
    num_loss_tokens = session.num_loss_tokens or 0
    if session.digest.startswith(TOKENS_ONLY):
        report.unproved[Invariant.SAMPLED] += 1
        digest = TOKENS_ONLY + token_digest(trajectory)
    else:
        digest = lease_digest(trajectory, num_loss_tokens)
    subject = f"session {session.id!r}"
    if session.digest != digest:
        detail = (
            f"its lease has the digest {session.digest!r:.14}..., while its tokens, rewards and {num_loss_tokens} "
            f"loss tokens have {digest!r:.14}..."
        )
        yield Violation(Invariant.SAMPLED, subject, detail)
    if not 0 < num_loss_tokens <= trajectory.num_sampled_tokens:
        detail = f"{session.num_loss_tokens} of its {trajectory.num_sampled_tokens} sampled tokens are in the loss"
        yield Violation(Invariant.SAMPLED, subject, detail)


def _check_span_of(session: _SessionRow, turns: Sequence[Turn]) -> Iterator[Violation]:
    """Check that the turns lie within their session's time."""
    subject = f"session {session.id!r}"
    first_s = min((turn.started_s for turn in turns), default=session.started_s)
    last_s = max((turn.ended_s for turn in turns), default=session.started_s)
    if first_s < session.started_s - CLOCK_SLACK_S:
        yield Violation(Invariant.TIMES, subject, "it started after one of its turns")
    if session.ended_s is not None and session.ended_s < last_s - CLOCK_SLACK_S:
        yield Violation(Invariant.TIMES, subject, "it ended before its start or one of its turns")
