"""Copies of a ledger with other rewards: what a run sampled, and what another judge, or the same one later, says of it.

Endings and leases get new digests, so `verify` holds of the copy. The ledger that is copied is only read.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from areal_agent.ledger import questions
from areal_agent.ledger.encoding import RewardRow, encode_rewards, lease_digest, row_digest
from areal_agent.ledger.files import NO_DIGEST, TOKENS_ONLY, Snapshot
from areal_agent.types import Rewards, Trajectory

_REWARD_AGAIN = (
    f"UPDATE endings SET {', '.join(f'{name} = ?' for name in RewardRow._fields)}, digest = ? "
    "WHERE session = (SELECT number FROM sessions WHERE id = ?)"
)


def copy_with_rewards(snapshot: Snapshot, folder: Path, rewards: Mapping[str, Rewards]) -> None:
    """Copy all files of a ledger into `folder`, where none of them is, with other rewards for these sessions, by id."""
    trajectories = {one: replace(questions.trajectory(snapshot, one), rewards=rewards[one]) for one in rewards}
    for connection in snapshot:
        name = Path(connection.execute("PRAGMA database_list").fetchone()[2]).name
        with closing(sqlite3.connect(folder / name)) as copy:
            connection.backup(copy)
            with copy:
                for trajectory in trajectories.values():
                    _reward_again(copy, trajectory)
                    if connection is snapshot[0]:
                        _lease_again(copy, trajectory)


def _reward_again(copy: sqlite3.Connection, trajectory: Trajectory) -> None:
    ending = questions.ending_in(copy, trajectory.session_id)
    if ending is None:  # it is in another file
        return
    row = encode_rewards(trajectory.rewards)
    digest = NO_DIGEST if ending.digest == NO_DIGEST else row_digest(ending.row._replace(**row._asdict()))
    copy.execute(_REWARD_AGAIN, (*row, digest, trajectory.session_id))


def _lease_again(copy: sqlite3.Connection, trajectory: Trajectory) -> None:
    lease = questions.lease_of((copy,), trajectory.session_id)
    if lease is not None and not lease[0].startswith(TOKENS_ONLY):
        digest = lease_digest(trajectory, lease[1])
        copy.execute("UPDATE leases SET digest = ? WHERE session = ?", (digest, trajectory.session_id))
