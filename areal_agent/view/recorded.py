"""One run as the page asks for it: its ledger, read in a thread of its own, and the rows of its metrics.

Everything is read when it is asked for and in bounded pieces, so a run of any length opens at once, and a run that goes
on is read as far as it is. Nothing here writes.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import orjson

from areal_agent.errors import ConfigError, LedgerError
from areal_agent.files import no_device
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger import pages, questions
from areal_agent.ledger.files import LedgerFiles, Snapshot, ledger_in, naming
from areal_agent.ledger.questions import STATUS_NOTE
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, Transcript
from areal_agent.types import Completion, JsonObject, Turn
from areal_agent.view.session import fate_of, reward_of

Given = ParamSpec("Given")
Result = TypeVar("Result")

MAX_ROW_BYTES = 4 * 2**20
"""So many bytes of metrics.jsonl are sent at once."""
PAGE_SIZE = 200
SEARCHED_SIZE = 100
"""A page of a search for text or tools reads so many rollouts."""
CONTEXT = 60
"""Characters shown before and after a text that was found."""
SEARCHES = ("text", "tool")


class RecordedRun:
    """A run folder that is open for reading. End it with `close`."""

    def __init__(
        self,
        path: Path,
        files: LedgerFiles,
        transcript: Transcript,
        thread: ThreadPoolExecutor,
        values: Path | None = None,
    ) -> None:
        self.path = path  # of the ledger
        self.transcript = transcript
        self.images = ImageFolder(path.parent / IMAGES)
        self._values = values
        self._files = files
        self._inode = path.stat().st_ino
        self._thread = thread

    @classmethod
    def open(cls, run_dir: Path, tokenizer: Path | None, values: Path | None = None) -> Self:
        """Open a run and read its newest rollouts. Raises ConfigError for no run, LedgerError for a damaged one.

        `values` is a folder with the values of turns, written by `areal_agent.episode`.
        """
        path = ledger_in(run_dir)
        files = LedgerFiles(path)
        try:
            with naming(path), files.snapshot() as snapshot:
                pages.page(snapshot, {}, (), PAGE_SIZE)
                transcript = Transcript.of_ledger(questions.note(snapshot, TRANSCRIPT_NOTE), path.parent, tokenizer)
        except BaseException:
            files.close()
            raise
        return cls(path, files, transcript, ThreadPoolExecutor(max_workers=1, thread_name_prefix="view"), values)

    async def ask(
        self, question: Callable[Concatenate[Snapshot, Given], Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Call a function with a snapshot of the ledger, in the run's thread. Raises LedgerError."""

        def answer() -> Result:
            self._require_same_file()
            with naming(self.path), self._files.snapshot() as snapshot:
                return question(snapshot, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._thread, answer)

    def _require_same_file(self) -> None:
        """Raise LedgerError if the file that is open is no longer the run's: SQLite would not notice."""
        try:
            is_same = self.path.stat().st_ino == self._inode
        except OSError:
            is_same = False
        if not is_same:
            raise LedgerError(f"{self.path} was moved, deleted or replaced since this page was opened; open a new one")

    def close(self) -> None:
        self._thread.shutdown()
        self._files.close()

    # ------------------------------------------------------------------------------------------ the run

    def state(self, snapshot: Snapshot, offset: int) -> JsonObject:
        """Return how the run stands, and the rows of its metrics from a byte of the file on.

        `next` is where later rows begin; it is 0 again when the file has become shorter, and all rows are to be read
        anew. `more` says that there are more rows now.
        """
        rows, num_damaged, following, size = _rows(self.path.with_name("metrics.jsonl"), offset)
        return {
            "name": self.path.parent.resolve().name,
            "folder": str(self.path.parent.resolve()),
            "status": questions.note(snapshot, STATUS_NOTE),
            "num_rollouts": pages.num_sessions(snapshot),
            "saves": _column(snapshot, "SELECT step FROM checkpoints ORDER BY step"),
            "starts": _column(snapshot, "SELECT checkpoint_step FROM incarnations ORDER BY number"),
            "rows": rows,
            "num_damaged_rows": num_damaged,
            "next": following,
            "more": following < size and bool(rows),
        }

    # ------------------------------------------------------------------------------------------ rollouts

    def values(self, session_id: str) -> JsonObject | None:
        """Return the values of a rollout's turns; None where none were written. Raises LedgerError."""
        path = None if self._values is None else self._values / f"{Path(session_id).name}.json"
        if path is None or not path.is_file():
            return None
        try:
            return orjson.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise LedgerError(f"{path} cannot be read: {error}; write it again, or leave --values out") from None

    def rollouts(self, snapshot: Snapshot, filters: Mapping[str, str], cursor: Sequence[int]) -> JsonObject:
        """Return a page of rollouts. `text` and `tool` are searched for in what was said, so their pages are short.

        Raises ConfigError for an unknown filter or a wrong value.
        """
        if unknown := set(filters) - set(pages.CONDITIONS) - set(SEARCHES):
            raise ConfigError(f"there is no filter {min(unknown)!r}; use {', '.join((*pages.CONDITIONS, *SEARCHES))}")
        known = {name: value for name, value in filters.items() if name in pages.CONDITIONS}
        searched = {name: filters[name] for name in SEARCHES if name in filters}
        found = pages.page(snapshot, known, cursor, SEARCHED_SIZE if searched else PAGE_SIZE)
        rows: list[JsonObject] = []
        for one in found.rollouts:
            excerpt = self._excerpt(snapshot, one.rollout.session_id, **searched) if searched else ""
            if excerpt is not None:
                listed = {"siblings": one.siblings, "versions": one.versions, "excerpt": excerpt}
                rows.append(described(one.rollout) | listed)
        return {"rollouts": rows, "num_read": len(found.rollouts), "cursor": found.cursor}

    def _excerpt(self, snapshot: Snapshot, session_id: str, text: str = "", tool: str = "") -> str | None:
        """Return the place of a text in a rollout that also called a tool; None if it has no such place."""
        turns, _ = questions.recorded(snapshot, session_id)
        if tool and not any(self._has_call(turn, answer, tool) for turn in turns for answer in turn.completions):
            return None
        for said in self._said(turns) if text else ():
            place = said.casefold().find(text.casefold())
            if place >= 0:
                return said[max(0, place - CONTEXT) : place + len(text) + CONTEXT]
        return None if text else ""

    def _has_call(self, turn: Turn, answer: Completion, tool: str) -> bool:
        if tool not in (self.transcript.text_of(answer.token_ids) or ""):
            return False
        calls = self.transcript.message(turn, answer).get("tool_calls") or ()
        return any(call.get("function", call).get("name") == tool for call in calls)

    def _said(self, turns: Sequence[Turn]) -> Sequence[str]:
        """Return all that was said: the strings of messages, and the answers."""
        return [
            *(text for turn in turns for message in turn.request_delta for text in _strings(message)),
            *(self.transcript.text_of(answer.token_ids) or "" for turn in turns for answer in turn.completions),
        ]


def described(one: questions.RolloutSummary) -> dict[str, Any]:
    """Return a rollout as a row of the page."""
    return {
        **{name: value for name, value in asdict(one).items() if name != "fate"},
        "fate": fate_of(one)[0],
        "reward": None if one.rewards.is_missing else one.rewards.total,
        "outcome": reward_of(one)[0],
    }


def _column(snapshot: Snapshot, query: str) -> list[Any]:
    return [value for (value,) in snapshot[0].execute(query)]


def _rows(path: Path, offset: int) -> tuple[list[JsonObject], int, int, int]:
    """Return whole rows from `offset` on, the number of damaged ones, where they end, and the size of the file."""
    try:
        with no_device(path).open("rb") as file:
            size = file.seek(0, 2)
            if offset > size:
                return [], 0, 0, size
            file.seek(offset)
            read = file.read(MAX_ROW_BYTES)
    except OSError:
        return [], 0, offset, offset  # a gateway alone has no metrics
    end = read.rfind(b"\n") + 1
    rows: list[JsonObject] = []
    num_damaged = 0
    for line in read[:end].splitlines():
        try:
            row = orjson.loads(line)
            row |= {"step": int(row["step"])}
            orjson.dumps(row)  # which nests less deeply than what is read, and has no huge numbers
            rows.append(row)
        except (KeyError, OverflowError, TypeError, ValueError):  # no JSON, no object, or of no step
            num_damaged += 1
    return rows, num_damaged, offset + end, size


def _strings(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return (value,)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for item in items for text in _strings(item)]
