"""What the ledger keeps beside sessions and fates: who the trainer is and how far, and how large the groups are.

A session says nothing of its siblings, so the size of a group is noted before its first session is.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from areal_agent.gateway.online.bound import Bound, Progress
from areal_agent.gateway.online.lineage import Lineage
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import JsonObject

TRAINER_NOTE = "online"
GROUP_NOTE = "online/group/"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerNote:
    """Where the trainer is, the bound that it named, and who it is; None of each: not known yet."""

    progress: Progress
    bound: Bound | None
    lineage: Lineage | None


async def read_trainer(ledger: Ledger) -> TrainerNote:
    note = cast("JsonObject | None", await ledger.get_note(TRAINER_NOTE))
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
    """Of a session without siblings nothing needs to be kept."""
    if size > 1:
        await ledger.set_note(GROUP_NOTE + group_id, size)


async def read_group_sizes(ledger: Ledger, group_ids: Iterable[str]) -> Mapping[str, int]:
    """By group; 1 where none was noted."""
    group_ids = tuple(group_ids)
    sizes = await asyncio.gather(*(ledger.get_note(GROUP_NOTE + group_id) for group_id in group_ids))
    return {group_id: size or 1 for group_id, size in zip(group_ids, sizes, strict=True)}
