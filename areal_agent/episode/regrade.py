"""Rewards computed anew from recorded answers: which of them differ, and a copy of the run that has the new ones."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.errors import ConfigError, unwritable
from areal_agent.ledger import questions
from areal_agent.ledger.copies import copy_with_rewards
from areal_agent.ledger.files import Snapshot
from areal_agent.replay.saved import Episode, SavedRun
from areal_agent.replay.stage import Played
from areal_agent.types import Rewards, SessionPurpose, Status, Trajectory

WHOLE = (Status.COMPLETED, Status.MISSING_REWARD, Status.REJECTED, Status.ERROR)
"""How a session ends whose workflow came to its own end, so that its record suffices to play it."""
KEPT = ("checkpoints", "model", "images")
"""Folders whose files never change: a copy on the same disk takes no room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regraded:
    """A session's rewards before and now. `fault` says why there are none now."""

    before: Trajectory
    status: Status
    rewards: Rewards
    fault: str = ""

    @property
    def is_changed(self) -> bool:
        return not self.fault and (self.status is not self.before.status or self.rewards != self.before.rewards)

    @property
    def is_writable(self) -> bool:
        """Return whether a copy gets the new rewards: of one that had none nothing was trained."""
        return self.is_changed and self.before.status is self.status is Status.COMPLETED

    def __str__(self) -> str:
        before, now = _told(self.before.status, self.before.rewards), _told(self.status, self.rewards)
        change = f"cannot be graded anew: {self.fault}" if self.fault else f"{before} -> {now}"
        return f"{self.before.session_id}: {change}"


def _told(status: Status, rewards: Rewards) -> str:
    parts = "".join(f", {name} {value:g}" for name, value in sorted(rewards.parts.items()))
    return f"{rewards.total:g}{parts}" if status is Status.COMPLETED else str(status)


def chosen(
    snapshot: Snapshot, run: SavedRun, purpose: SessionPurpose, *, step: int | None, only_failed: bool
) -> tuple[Sequence[Episode], int]:
    """Return the sessions of `view`'s filter that can be played whole, and the number of the others."""
    groups = questions.group_ids(snapshot, purpose, step=step, only_failed=only_failed)
    found = [one for ones in questions.rollouts_of(snapshot, groups).values() for one in ones if one.purpose == purpose]
    found = [one for one in found if not only_failed or one.status != Status.COMPLETED]
    own = [one for one in found if not run.has_roles(snapshot, one.session_id, one.group_id)]
    own = [one for one in own if run.benchmark_of(one.group_id) is None]
    whole = [one for one in own if one.num_turns and one.status in WHOLE]
    return [run.episode(snapshot, one.session_id) for one in whole], len(found) - len(whole)


def regraded(episode: Episode, played: Played) -> Regraded:
    """Compare the rewards of an episode that was played again."""
    assert episode.trajectory is not None  # `chosen` has those that ended
    faults = [str(one) for one in played.differences if not one.is_bridged]
    faults += [f"turn {number} was not asked for" for number in played.not_made]
    if played.trajectory.status is Status.INFRA:
        faults.append(str(played.trajectory.error))
    return Regraded(
        before=episode.trajectory,
        status=played.trajectory.status,
        rewards=played.rewards,
        fault=faults[0] if faults else "",
    )


def write_copy(run: SavedRun, snapshot: Snapshot, target: Path, grades: Sequence[Regraded]) -> int:
    """Copy the run to `target` with the new rewards, whole or not at all; return the number of sessions that got them.

    Raises ConfigError when `target` exists. Files that grow are copied, checkpoints share their bytes where they can.
    """
    source = run.folder.path
    if target.exists():
        raise ConfigError(f"--write {str(target)!r} exists; name a folder that does not")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--write {str(target)!r} cannot be made: its parent is no folder; make that first")
    rewards = {one.before.session_id: one.rewards for one in grades if one.is_writable}
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.mkdir(mode=0o700)
        copy_with_rewards(snapshot, part, rewards)
        for path in source.iterdir():
            if path.is_dir() and path.name != "logs":
                shutil.copytree(path, part / path.name, copy_function=_linked if path.name in KEPT else shutil.copy2)
            elif path.is_file() and not path.name.startswith(("ledger", "admin_key", "engines_url")):
                shutil.copy2(path, part / path.name)
        part.rename(target)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(rewards)


def _linked(source: str, target: str) -> Any:
    """Give a file another name, or copy it where that cannot be."""
    with suppress(OSError):
        os.link(source, target)
        return target
    return shutil.copy2(source, target)
