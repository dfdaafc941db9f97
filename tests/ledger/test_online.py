"""The questions and writes of a standalone gateway.

1. a late reward is durable, and completes a session that only lacked it; 2. a leased, dropped or damaged session
takes none; 3. the leases of a step can be listed until it is trained; 4. leases after a checkpoint return, and those
before are trained; 5. a restart that names no checkpoint ends orphans and leaves leases alone; 6. a session is found
by its key.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.types import Drop, Fate, Rewards, Status, Trajectory


def ids(trajectories: tuple[Trajectory, ...]) -> list[str]:
    return [one.session_id for one in trajectories]


async def test_a_late_reward_is_durable_and_completes_what_lacked_one(ledger: Ledger, make, path: Path) -> None:
    await ledger.own.open_session(make.session("a"))
    await ledger.own.append_turn("a", make.turn("a"))
    ending = make.ending("a", status=Status.MISSING_REWARD, error="no reward", rewards=Rewards())
    await ledger.own.close_session(ending)
    await ledger.set_rewards("a", Rewards(parts={"style": 0.5}))
    assert (await ledger.trajectory("a")).status is Status.MISSING_REWARD
    earned = Rewards(final=0.25, by_completion={"a-c0": 1.0}, parts={"style": 0.5})
    await ledger.set_rewards("a", earned)
    await ledger.aclose()
    again = await Ledger.open(path, create=False)
    trajectory = await again.trajectory("a")
    await again.aclose()
    assert (trajectory.status, trajectory.error, trajectory.rewards) == (Status.COMPLETED, None, earned)
    assert verify(path).violations == ()


async def test_an_ending_that_was_changed_takes_no_late_reward(ledger: Ledger, make, path: Path) -> None:
    await make.closed(ledger.own, "a")
    await ledger.aclose()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE endings SET final_reward = 0.5")
    again = await Ledger.open(path, create=False)
    with pytest.raises(LedgerError, match="was changed after it was written"):
        await again.set_rewards("a", Rewards(final=2.0))
    await again.aclose()


@pytest.mark.parametrize("end", ["leased", "dropped", "open"])
async def test_what_is_leased_or_dropped_or_open_takes_no_late_reward(ledger: Ledger, make, end: str) -> None:
    if end == "open":
        await ledger.own.open_session(make.session("a"))
    else:
        await make.closed(ledger.own, "a")
    if end == "leased":
        await make.leased(ledger, 1, "a")
    elif end == "dropped":
        await ledger.drop({"a": Drop.STALE})
    with pytest.raises(LedgerError, match=end):
        await ledger.set_rewards("a", Rewards(final=2.0))


async def test_what_is_leased_can_be_asked_for_until_it_is_trained(ledger: Ledger, make) -> None:
    await make.closed(ledger.own, "a", "b", "c")
    await make.leased(ledger, 1, "a", "b")
    await make.leased(ledger, 2, "c")
    assert ids(await ledger.ask(questions.leased, 1)) == ["a", "b"]
    await ledger.commit_checkpoint(1, "checkpoints/1")
    assert ids(await ledger.ask(questions.leased, 1)) == []
    assert ids(await ledger.ask(questions.leased, 2)) == ["c"]


async def test_leases_after_the_checkpoint_return(ledger: Ledger, make, path: Path) -> None:
    await make.closed(ledger.own, "a", "b", "c")
    for step, id in enumerate("abc", start=1):
        await make.leased(ledger, step, id)
    assert await ledger.return_leases(1) == 2
    assert await ledger.return_leases(1) == 0
    assert (await ledger.trajectory("a")).fate == Fate(trained_step=1)  # the checkpoint was never acknowledged
    assert ids(await ledger.ask(questions.waiting)) == ["b", "c"]
    await make.leased(ledger, 2, "c")
    assert verify(path).violations == ()


async def test_a_restart_without_a_checkpoint_leaves_leases_alone(ledger: Ledger, make, path: Path) -> None:
    await make.closed(ledger.own, "a", "b")
    await make.leased(ledger, 1, "a")
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await make.leased(ledger, 2, "b")
    await ledger.own.open_session(make.session("cut off"))
    await ledger.aclose()
    again = await Ledger.open(path, create=False)
    incarnation = await again.begin_incarnation(None)
    assert (incarnation.number, incarnation.num_orphans, incarnation.num_returned) == (1, 1, 0)
    assert ids(await again.ask(questions.leased, 2)) == ["b"]
    assert (await again.trajectory("cut off")).fate == Fate(dropped=Drop.ORPHAN)
    await again.aclose()
    assert verify(path).violations == ()


async def test_a_session_is_found_by_its_key(ledger: Ledger, make) -> None:
    await ledger.own.open_session(make.session("a", key_hash="aa" * 32))
    assert await ledger.ask(questions.session_with_key, "aa" * 32) == "a"
    assert await ledger.ask(questions.session_with_key, "bb" * 32) is None
