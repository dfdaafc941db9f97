"""What must be true of every ledger, and what a breach of it looks like."""

from dataclasses import dataclass
from enum import StrEnum


class Invariant(StrEnum):
    """A promise, in words that `verify` prints."""

    INTACT = "the files are intact and every reference leads somewhere"
    UNIQUE = "a session and an answer are in one file only"
    READABLE = "every row is a record"
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
    DELIVERY = "what was never delivered is an answer of its session"
    TIMES = "what begins later is not recorded as earlier"


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A breach: of which promise, by what, and how."""

    invariant: Invariant
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.detail}"
