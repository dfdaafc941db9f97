"""A restart settles what the previous process left.

1. sessions that a dead process left open end as orphans, with their turns; 2. an orphan of an evaluation has no fate;
3. leases that the checkpoint covers are trained, although their commit was lost; 4. later ones wait and can be leased
again; 5. existing fates stay; 6. a run that resumes from an earlier checkpoint than the newest trains the lost steps
again; 7. a completed run that goes on is running again; 8. a standalone gateway returns the leases after a checkpoint
without a restart (tests/gateway/test_online.py has what else it does).
"""

from pathlib import Path

import pytest

from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.ledger.writes import Incarnation
from areal_agent.types import Drop, Fate, SessionPurpose, Status


@pytest.fixture
def restart(ledger: Ledger, path: Path):
    """Close the ledger, as a crash would leave it, and begin the next incarnation."""

    async def restart(checkpoint_step: int) -> tuple[Ledger, Incarnation]:
        await ledger.aclose()
        again = await Ledger.open(path, create=False)
        return again, await again.begin_incarnation(checkpoint_step)

    return restart


async def test_what_was_open_ends_as_an_orphan_with_its_turns(ledger: Ledger, make, restart) -> None:
    await ledger.own.open_session(make.session("s"))
    await ledger.own.append_turn("s", make.turn("s"))
    again, incarnation = await restart(0)
    trajectory = await again.trajectory("s")
    await again.aclose()
    assert incarnation == Incarnation(number=1, num_orphans=1, num_returned=0)
    assert (trajectory.status, trajectory.fate) == (Status.ORPHAN, Fate(dropped=Drop.ORPHAN))
    assert trajectory.turns == (make.turn("s"),)
    assert trajectory.ended_s == make.turn("s").ended_s


async def test_an_orphan_of_an_evaluation_has_no_fate(ledger: Ledger, make, restart) -> None:
    await ledger.own.open_session(make.session("e", purpose=SessionPurpose.EVAL))
    again, _ = await restart(0)
    trajectory = await again.trajectory("e")
    await again.aclose()
    assert (trajectory.status, trajectory.fate) == (Status.ORPHAN, None)


async def test_leases_are_settled_by_the_checkpoint(ledger: Ledger, make, restart) -> None:
    await make.closed(ledger.own, "a", "b", "c", "d")
    await make.leased(ledger, 1, "a", "b")
    await make.leased(ledger, 2, "c")
    await make.leased(ledger, 3, "d")
    again, incarnation = await restart(2)  # published, but its commit was lost
    fates = [(await again.trajectory(id)).fate for id in "abcd"]
    waiting = [one.session_id for one in await again.ask(questions.waiting)]
    await make.leased(again, 3, "d")
    await again.aclose()
    assert incarnation.num_returned == 1
    assert fates == [Fate(trained_step=1), Fate(trained_step=1), Fate(trained_step=2), None]
    assert waiting == ["d"]


async def test_what_has_its_fate_keeps_it(ledger: Ledger, make, restart) -> None:
    await make.closed(ledger.own, "a", "b")
    await make.leased(ledger, 1, "a")
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await ledger.drop({"b": Drop.FILTERED})
    before = await ledger.ask(questions.counts)
    again, _ = await restart(1)
    after = await again.ask(questions.counts)
    await again.aclose()
    assert after == before


async def test_steps_of_a_lost_checkpoint_are_trained_again(ledger: Ledger, make, restart) -> None:
    await make.closed(ledger.own, "a", "b")
    await make.leased(ledger, 1, "a")
    await make.leased(ledger, 2, "b")
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await ledger.commit_checkpoint(2, "checkpoints/2")
    again, incarnation = await restart(1)  # the newest checkpoint is gone
    assert incarnation.num_returned == 1
    await make.leased(again, 2, "b")
    await again.commit_checkpoint(2, "checkpoints/2")
    fates = [(await again.trajectory(id)).fate for id in "ab"]
    await again.aclose()
    assert fates == [Fate(trained_step=1), Fate(trained_step=2)]


async def test_a_completed_run_that_goes_on_is_running_again(ledger: Ledger, restart) -> None:
    await ledger.set_note("status", "completed")
    again, _ = await restart(0)
    status = await again.ask(questions.note, "status")
    await again.aclose()
    assert status == "running"


async def test_leases_after_the_checkpoint_return(ledger: Ledger, path: Path, make) -> None:
    await make.closed(ledger.own, "a", "b", "c")
    for step, id in enumerate("abc", start=1):
        await make.leased(ledger, step, id)
    assert await ledger.return_leases(1) == 2
    assert await ledger.return_leases(1) == 0
    assert (await ledger.trajectory("a")).fate == Fate(trained_step=1)  # the checkpoint was never acknowledged
    assert [one.session_id for one in await ledger.ask(questions.waiting)] == ["b", "c"]
    await make.leased(ledger, 2, "c")
    assert verify(path).violations == ()
