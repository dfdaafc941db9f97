"""A closed training trajectory is exactly one of waiting, leased, trained, dropped.

1. waiting trajectories come in the order of closing, whatever their status; 2. evaluation never waits and is never
leased or dropped; 3. a commit trains every lease up to its step, each by its own step, and no later one; committing
twice changes nothing; 4. what is open, unknown, leased, trained or dropped cannot be leased, dropped or rewarded, nor
can anything in the same call; 5. no lease is for a step that a checkpoint holds; 6. notes hold values; 7. group numbers
count on. Counts are in test_shards.py; dropping twice is dropping once in tests/gateway/test_online.py.
"""

import pytest

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import Drop, Fate, Rewards, SessionPurpose, Status


async def waiting_ids(ledger: Ledger) -> list[str]:
    return [trajectory.session_id for trajectory in await ledger.ask(questions.waiting)]


async def test_waiting_is_in_the_order_of_closing_whatever_the_status(ledger: Ledger, make) -> None:
    for id in ("a", "b", "c"):
        await ledger.own.open_session(make.session(id))
    await ledger.own.close_session(make.ending("c"))
    await ledger.own.close_session(make.ending("a", status=Status.ERROR, error="it raised"))
    assert [(one.session_id, one.status) for one in await ledger.ask(questions.waiting)] == [
        ("c", Status.COMPLETED),
        ("a", Status.ERROR),
    ]


async def test_evaluation_never_waits_and_has_no_fate(ledger: Ledger, make) -> None:
    await make.closed(ledger.own, "e", purpose=SessionPurpose.EVAL)
    assert await waiting_ids(ledger) == []
    with pytest.raises(LedgerError, match="its purpose is 'eval', not 'train'"):
        await make.leased(ledger, 1, "e")
    with pytest.raises(LedgerError, match="its purpose is 'eval', not 'train'"):
        await ledger.drop({"e": Drop.STALE})
    assert (await ledger.trajectory("e")).fate is None


async def test_a_commit_trains_each_lease_up_to_its_step_and_twice_is_once(ledger: Ledger, make) -> None:
    await make.closed(ledger.own, "a", "b", "c")
    for step, id in enumerate("abc", start=1):
        await make.leased(ledger, step, id)
    assert (await waiting_ids(ledger), (await ledger.trajectory("a")).fate) == ([], None)
    for _ in range(2):
        await ledger.commit_checkpoint(2, "checkpoints/2")
        fates = [(await ledger.trajectory(id)).fate for id in "abc"]
        assert fates == [Fate(trained_step=1), Fate(trained_step=2), None]
        assert [len(await ledger.ask(questions.leased, step)) for step in (1, 2, 3)] == [0, 0, 1]


async def prepared(ledger: Ledger, make) -> None:
    """Record one session in each state."""
    await make.closed(ledger.own, "trained", "leased", "dropped", "waiting")
    await ledger.own.open_session(make.session("open"))
    await make.leased(ledger, 1, "trained")
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await make.leased(ledger, 2, "leased")
    await ledger.drop({"dropped": Drop.STALE})


REFUSALS = [
    ("unknown", "no session 'unknown'"),
    ("open", "it is still open"),
    ("leased", "it is leased for step 2"),
    ("trained", r"its fate is trained\(1\) already"),
    ("dropped", r"its fate is dropped\(stale\) already"),
]


@pytest.mark.parametrize(("id", "reason"), REFUSALS)
async def test_a_lease_a_drop_and_a_reward_are_refused_whole(ledger: Ledger, make, id: str, reason: str) -> None:
    await prepared(ledger, make)
    with pytest.raises(LedgerError, match=reason):
        await ledger.lease(3, [Lease(session_id=one, digest="d", num_loss_tokens=1) for one in ("waiting", id)])
    with pytest.raises(LedgerError, match=reason):
        await ledger.drop({"waiting": Drop.FILTERED, id: Drop.FILTERED})
    with pytest.raises(LedgerError, match=reason):
        await ledger.set_rewards(id, Rewards(final=2.0))
    assert await waiting_ids(ledger) == ["waiting"]


async def test_no_lease_for_a_step_that_a_checkpoint_holds(ledger: Ledger, make) -> None:
    await make.closed(ledger.own, "a")
    await ledger.commit_checkpoint(4, "checkpoints/4")
    with pytest.raises(LedgerError, match="the checkpoint of step 4 is committed already"):
        await make.leased(ledger, 4, "a")


async def test_notes_hold_values(ledger: Ledger) -> None:
    assert await ledger.ask(questions.note, "success") is None
    await ledger.set_note("success", {"before": 0.25})
    await ledger.set_note("success", {"before": 0.5})
    assert await ledger.ask(questions.note, "success") == {"before": 0.5}


async def test_groups_of_which_nothing_completed_were_cut_off(ledger: Ledger, make) -> None:
    await ledger.own.open_session(make.session("open", group_id="running"))
    for id, group_id, status in (
        ("a", "cancelled", Status.CANCELLED),
        ("b", "failed", Status.ERROR),
        ("h", "failing", Status.ERROR),
        ("c", "half", Status.COMPLETED),
        ("d", "half", Status.CANCELLED),
    ):
        await ledger.own.open_session(make.session(id, group_id=group_id))
        await ledger.own.close_session(make.ending(id, status=status))
    await make.closed(ledger.own, "e", group_id="left over")
    await make.closed(ledger.own, "f", group_id="stale")
    await make.closed(ledger.own, "g", group_id="evaluation", purpose=SessionPurpose.EVAL)
    await ledger.drop({"b": Drop.ERROR, "e": Drop.ORPHAN, "f": Drop.STALE})
    assert await ledger.ask(questions.drawn_groups) == {
        "running": True,
        "cancelled": True,
        "failed": False,
        "failing": True,
        "half": False,
        "left over": True,
        "stale": False,
    }
