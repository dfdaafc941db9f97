"""The journal that a gateway relies on.

1. turns come back in the order of appending, also of many sessions at once; 2. refused are: a turn of an unknown or
a closed session, a second end, a second session, turn or completion of one id, and an open session's trajectory; 3. a
refused write leaves the others in its transaction alone; 4. a full disk fails the whole group, and the ledger goes on
when there is room; 5. a cancelled caller affects nobody else; 6. a closed ledger refuses work, and may be closed again;
7. closing commits what is queued.
"""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from areal_agent.errors import DiskFull, LedgerError
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import GroupCommitWriter


async def test_turns_come_back_in_order_of_many_sessions_at_once(ledger: Ledger, make) -> None:
    ids = [f"s{number}" for number in range(30)]
    await asyncio.gather(*(make.closed(ledger.own, id, num_turns=5) for id in ids))
    for id in ids:
        turns = (await ledger.trajectory(id)).turns
        assert turns == tuple(make.turn(id, number) for number in range(5))


async def test_what_does_not_fit_is_refused(ledger: Ledger, make) -> None:
    own = ledger.own
    await make.closed(own, "closed")
    await own.open_session(make.session("open"))
    await own.append_turn("open", make.turn("open"))
    for call, reason in (
        (own.append_turn("ghost", make.turn("ghost")), "has no session 'ghost'"),
        (own.append_turn("closed", make.turn("closed", 2)), "'closed' has ended"),
        (own.close_session(make.ending("closed")), "'closed' has ended"),
        (own.open_session(make.session("open")), r"sessions\.id"),
        (own.append_turn("open", make.turn("open", completions=())), r"turns\.id"),
        (ledger.trajectory("open"), "still open"),
    ):
        with pytest.raises(LedgerError, match=reason):
            await call


async def test_a_second_completion_of_one_id_is_refused_with_its_whole_turn(ledger: Ledger, make) -> None:
    await ledger.own.open_session(make.session("s"))
    twins = (make.completion("twin"), make.completion("twin"))
    with pytest.raises(LedgerError, match=r"completions\.id"):
        await ledger.own.append_turn("s", make.turn("s", completions=twins))
    await ledger.own.close_session(make.ending("s"))
    assert (await ledger.trajectory("s")).turns == ()


async def test_a_refused_write_leaves_its_neighbours(ledger: Ledger, make) -> None:
    await ledger.own.open_session(make.session("s"))
    first, refused, last = await asyncio.gather(
        ledger.own.append_turn("s", make.turn("s", 0)),
        ledger.own.append_turn("s", make.turn("s", 0)),
        ledger.own.append_turn("s", make.turn("s", 1)),
        return_exceptions=True,
    )
    assert first is None and last is None
    assert isinstance(refused, LedgerError)
    await ledger.own.close_session(make.ending("s"))
    assert (await ledger.trajectory("s")).turns == (make.turn("s", 0), make.turn("s", 1))


async def test_a_full_disk_fails_the_group_and_passes(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "small.sqlite", isolation_level=None, check_same_thread=False)
    connection.execute("CREATE TABLE lines (line TEXT)")
    connection.execute("PRAGMA max_page_count = 10")  # SQLite's own way of a full disk

    def insert(text: str):
        return lambda connection: connection.execute("INSERT INTO lines VALUES (?)", (text,)) and None

    writer = GroupCommitWriter(connection)
    outcomes = await asyncio.gather(
        writer.run(insert("small")), writer.run(insert("big" * 100_000)), return_exceptions=True
    )
    assert [type(one) for one in outcomes] == [DiskFull, DiskFull]
    assert "full" in str(outcomes[0])
    await writer.run(insert("small"))
    lines = await writer.run(lambda connection: connection.execute("SELECT line FROM lines").fetchall())
    assert lines == [("small",)]
    writer.stop()
    writer.close()


async def test_a_cancelled_caller_harms_nobody(ledger: Ledger, make) -> None:
    await ledger.own.open_session(make.session("s"))
    impatient = asyncio.create_task(ledger.own.append_turn("s", make.turn("s", 0)))
    await asyncio.sleep(0)  # it is queued
    impatient.cancel()
    await ledger.own.append_turn("s", make.turn("s", 1))
    with pytest.raises(asyncio.CancelledError):
        await impatient


async def test_a_closed_ledger_refuses_and_closes_again(ledger: Ledger, make) -> None:
    await ledger.aclose()
    with pytest.raises(LedgerError, match="the ledger is closed"):
        await ledger.own.open_session(make.session("s"))
    with pytest.raises(LedgerError, match="the ledger is closed"):
        await ledger.ask(questions.waiting)
    await ledger.aclose()


async def test_closing_commits_what_is_queued(path: Path, make) -> None:
    ledger = await Ledger.open(path, create=True)
    queued = [asyncio.create_task(ledger.own.open_session(make.session(f"s{number}"))) for number in range(50)]
    await asyncio.sleep(0)
    await ledger.aclose()
    await asyncio.gather(*queued)
    ledger = await Ledger.open(path, create=False)
    assert (await ledger.ask(questions.counts)).num_open == 50
    await ledger.aclose()
