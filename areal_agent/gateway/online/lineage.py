"""Whose train steps a gateway counts, and the notes on trainer and groups in the ledger.

The ledger numbers train steps once for all trainers, always upwards. Each trainer counts from its own checkpoint; its
step s is the ledger's step `offset + s`. So a trainer that takes a gateway over begins after everything that was
trained before and undoes none of it. A lineage also holds the trainer's incarnations: tokens of any other are another
trainer's.

A session does not name its siblings, so the size of a group is noted before its first session.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, cast

from areal_agent.errors import RequestError
from areal_agent.gateway.online.groups import Bound, Labels, Progress
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import JsonObject

TRAINER_NOTE = "online"
GROUP_NOTE = "online/group/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The steps of one trainer, in the ledger's numbers."""

    trainer: str | None = None  # None for a trainer without a name
    base: int = 0  # the ledger's last checkpoint when the trainer came: what others trained is never undone
    offset: int = 0
    labels: Labels = field(default_factory=Labels)

    @classmethod
    def read(cls, fields: JsonObject) -> Self:
        """Read a lineage from its JSON."""
        labels = Labels(incarnations=tuple(fields.get("labels", {}).get("incarnations", ())))
        return cls(
            trainer=fields.get("trainer"), base=fields.get("base", 0), offset=fields.get("offset", 0), labels=labels
        )

    def serving(self, incarnation: int | None) -> Self:
        """Return the lineage when weights of `incarnation` serve; None if the trainer does not say which."""
        return self if incarnation is None else replace(self, labels=self.labels.naming(incarnation))

    def ledger_step(self, step: int) -> int:
        return self.offset + step

    def after(self, step: int) -> Self:
        """Return the lineage when the trainer resumes from its own checkpoint of `step`."""
        return replace(self, offset=max(self.offset, self.base - step))


def lineage_for(trainer: str | None, held: Lineage | None) -> Lineage:
    """Return the lineage of a trainer's call. The first trainer gets a gateway that nobody has.

    Raises RequestError (409) when another trainer has it.
    """
    if held is None:
        return Lineage(trainer=trainer)
    if held.trainer != trainer:
        raise conflict(
            f"this gateway belongs to {_name(held.trainer)}, not to {_name(trainer)}; to take it over, call "
            '/rl/return {"trainer": ..., "after_step": ..., "adopt": true}: what was trained stays trained',
            code="other_trainer",
        )
    return held


def is_other(trainer: str | None, held: Lineage | None) -> bool:
    return held is not None and held.trainer != trainer


def require_nothing_undone(after_step: int, lineage: Lineage, last_checkpoint: int) -> None:
    """Raise RequestError (409) if resuming after `after_step` would undo what a checkpoint has trained."""
    committed = last_checkpoint - lineage.offset
    if after_step < committed:
        raise conflict(
            f"after_step is {after_step}, but the checkpoint of step {committed} is acknowledged: what it trained "
            'would wait again. If that checkpoint is lost, say "adopt": true; a new run names a "trainer" of its own '
            'and says "adopt": true, which undoes nothing',
            code="would_undo",
        )


def conflict(message: str, *, code: str = "conflict") -> RequestError:
    return RequestError(message, status=409, code=code)


def _name(trainer: str | None) -> str:
    return "a nameless trainer" if trainer is None else f"trainer {trainer!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerNote:
    """The trainer's progress, bound and lineage; None for what is not known yet."""

    progress: Progress
    bound: Bound | None
    lineage: Lineage | None


async def read_trainer(ledger: Ledger) -> TrainerNote:
    note = cast("JsonObject | None", await ledger.ask(questions.note, TRAINER_NOTE))
    if note is None:
        return TrainerNote(progress=Progress(), bound=None, lineage=None)
    bound: Any = note.get("bound")
    return TrainerNote(
        progress=Progress.read(note["progress"]),
        bound=Bound(**bound) if bound else None,
        lineage=Lineage.read(note.get("lineage") or {}),
    )


async def write_trainer(ledger: Ledger, note: TrainerNote) -> None:
    await ledger.set_note(TRAINER_NOTE, asdict(note))


async def write_group_size(ledger: Ledger, group_id: str, size: int) -> None:
    """Note a group's size. A session without siblings needs no note."""
    if size > 1:
        await ledger.set_note(GROUP_NOTE + group_id, size)


async def read_group_sizes(ledger: Ledger, group_ids: Iterable[str]) -> Mapping[str, int]:
    """Return the size of each group; 1 where none was noted."""
    group_ids = tuple(group_ids)
    sizes = await asyncio.gather(*(ledger.ask(questions.note, GROUP_NOTE + group_id) for group_id in group_ids))
    return {group_id: size or 1 for group_id, size in zip(group_ids, sizes, strict=True)}
