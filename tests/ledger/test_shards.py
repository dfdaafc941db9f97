"""A ledger whose sessions lie in several files.

1. the coordinator reads what a worker wrote, also in a shard that was made later; 2. waiting trajectories come in the
order of closing over all files, up to the limit; 3. counts cover all files; 4. open sessions of a dead worker end as
orphans when the coordinator says so; 5. a shard with a live writer is an error that changes nothing; 6. orphans are
dropped: they no longer wait, and are neither leased nor dropped for another reason; 7. one file has one writer; 8. a
shard is not a ledger, nor a ledger a shard; 9. a finished run leaves one file per shard, also of a dead worker; 10. a
shard without tables holds up nobody; 11. a copy of the ledger beside it is not a shard, and no worker can write where
nobody reads; 12. a late reward of a shard's session is refused; 13. a shard's session is found by its key, and its
leases can be listed. That its sessions are leased and trained, and end at the next incarnation: test_versions.py.
"""

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions
from areal_agent.ledger.files import shard_path, shard_paths
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import LedgerShard
from areal_agent.ledger.verify import verify
from areal_agent.types import Drop, Fate, Rewards, SessionPurpose, Status

OpenShard = Callable[[str], Awaitable[LedgerShard]]


@pytest_asyncio.fixture
async def open_shard(ledger: Ledger, path: Path) -> AsyncIterator[OpenShard]:
    """Opens shards beside the ledger, which is made first and closed last."""
    opened: list[LedgerShard] = []

    async def open_it(name: str) -> LedgerShard:
        opened.append(await LedgerShard.open(shard_path(path, name), create=True))
        return opened[-1]

    yield open_it
    for shard in opened:
        await shard.aclose()


async def test_a_later_shard_is_read(ledger: Ledger, open_shard: OpenShard, make) -> None:
    with pytest.raises(LedgerError, match="has no session 'a'"):
        await ledger.trajectory("a")
    await make.closed(await open_shard("w0"), "a")
    assert (await ledger.trajectory("a")).turns == (make.turn("a", 0), make.turn("a", 1))


async def test_what_waits_is_in_the_order_of_closing(ledger: Ledger, open_shard: OpenShard, make) -> None:
    files = [ledger.own, await open_shard("w0"), await open_shard("w1")]
    for number in range(9):
        file, id = files[number % 3], f"s{number}"
        await file.open_session(make.session(id))
        await file.close_session(make.ending(id, ended_s=make.START_S + number))
    assert [one.session_id for one in await ledger.ask(questions.waiting)] == [f"s{number}" for number in range(9)]
    assert [one.session_id for one in await ledger.ask(questions.waiting, limit=4)] == ["s0", "s1", "s2", "s3"]
    assert (await ledger.ask(questions.counts)).num_waiting == 9


async def test_figures_are_of_all_files(ledger: Ledger, open_shard: OpenShard, path: Path, make) -> None:
    first, second = await open_shard("w0"), await open_shard("w1")
    await make.closed(first, "a", group_id="g000003")
    await make.closed(second, "b", group_id="g000041")
    await make.closed(second, "e", group_id="eval", purpose=SessionPurpose.EVAL)
    await make.closed(ledger.own, "c", group_id="g000007")
    await second.open_session(make.session("open"))
    await make.leased(ledger, 1, "a", "c")
    await ledger.commit_checkpoint(1, "checkpoints/1")
    assert await ledger.ask(questions.drawn_groups) == {
        "g000000": True,
        "g000003": False,
        "g000041": False,
        "g000007": False,
    }
    assert await ledger.ask(questions.count_tokens) == (3 * 2 * 4, 2 * 8)
    counts = await ledger.ask(questions.counts)
    assert (counts.num_open, counts.num_closed, counts.num_eval) == (1, 4, 1)
    assert (counts.num_trained, counts.num_waiting) == (2, 1)
    report = verify(path)
    assert (report.counts, report.num_turns, report.violations) == (counts, 8, ())


async def test_a_dead_workers_sessions_end_when_the_coordinator_is_told(
    ledger: Ledger, open_shard: OpenShard, make
) -> None:
    dead, alive = await open_shard("w0"), await open_shard("w1")
    await make.closed(dead, "closed")
    for shard, id in ((dead, "a"), (dead, "b"), (alive, "c")):
        await shard.open_session(make.session(id))
        await shard.append_turn(id, make.turn(id))
    await dead.aclose()
    assert await ledger.end_orphans("w0") == ("a", "b")
    assert await ledger.end_orphans("w7") == ()  # it never made its shard
    orphan = await ledger.trajectory("a")
    assert (orphan.status, orphan.fate) == (Status.ORPHAN, Fate(dropped=Drop.ORPHAN))
    assert orphan.turns == (make.turn("a"),)
    await alive.close_session(make.ending("c"))
    again = await open_shard("w0")
    await make.closed(again, "d")
    assert {one.session_id for one in await ledger.ask(questions.waiting)} == {"closed", "c", "d"}


async def test_a_live_worker_forbids_an_incarnation(ledger: Ledger, open_shard: OpenShard, make) -> None:
    dead, alive = await open_shard("w0"), await open_shard("w1")
    for shard, id in ((dead, "a"), (alive, "b")):
        await shard.open_session(make.session(id))
    await dead.aclose()
    with pytest.raises(LedgerError, match=r"a worker is still writing to ledger-w1\.sqlite"):
        await ledger.begin_incarnation(0)
    with pytest.raises(LedgerError, match=r"a worker is still writing to ledger-w1\.sqlite"):
        await ledger.end_orphans("w1")
    assert (await ledger.ask(questions.counts)).num_open == 2


async def test_orphans_are_dropped(ledger: Ledger, open_shard: OpenShard, make) -> None:
    shard = await open_shard("w0")
    await shard.open_session(make.session("a"))
    await shard.append_turn("a", make.turn("a"))
    await shard.aclose()
    await ledger.end_orphans("w0")
    assert await ledger.ask(questions.waiting) == ()
    await ledger.drop({"a": Drop.ORPHAN})  # it is already
    with pytest.raises(LedgerError, match=r"its fate is dropped\(orphan\) already"):
        await ledger.drop({"a": Drop.STALE})
    with pytest.raises(LedgerError, match=r"its fate is dropped\(orphan\) already"):
        await make.leased(ledger, 1, "a")
    assert (await ledger.ask(questions.counts)).drops == {Drop.ORPHAN: 1}


async def test_a_file_has_one_writer(open_shard: OpenShard) -> None:
    await open_shard("w0")
    with pytest.raises(LedgerError, match=r"a worker is still writing to ledger-w0\.sqlite"):
        await open_shard("w0")


async def test_a_shard_is_no_ledger(ledger: Ledger, open_shard: OpenShard, path: Path) -> None:
    shard = await open_shard("w0")
    await shard.aclose()
    await ledger.aclose()
    with pytest.raises(LedgerError, match="is a worker's shard, not the ledger that it belongs to"):
        await Ledger.open(shard_path(path, "w0"), create=False)
    with pytest.raises(LedgerError, match="is a whole ledger, not a worker's shard"):
        await LedgerShard.open(path, create=False)


async def test_a_run_that_is_over_leaves_one_file_a_shard(path: Path, make) -> None:
    ledger = await Ledger.open(path, create=True)
    await ledger.begin_incarnation(0)
    shard = await LedgerShard.open(shard_path(path, "w0"), create=True)
    await make.closed(shard, "a")
    await ledger.trajectory("a")  # it holds the shard open
    await shard.aclose()
    await ledger.aclose()
    left = {entry.name for entry in os.scandir(path.parent) if not entry.name.endswith(".lock")}
    assert left == {path.name, "ledger-w0.sqlite"}
    assert shard_paths(path).keys() == {"w0"}


async def test_a_shard_without_tables_holds_up_nobody(ledger: Ledger, open_shard: OpenShard, path: Path, make) -> None:
    await make.closed(ledger.own, "a")
    shard_path(path, "w0").touch()  # as a worker leaves it for a moment, or dies
    assert (await ledger.trajectory("a")).session_id == "a"
    await make.closed(await open_shard("w0"), "b")
    assert (await ledger.trajectory("b")).session_id == "b"


async def test_a_late_reward_of_a_shards_session_is_refused(ledger: Ledger, open_shard: OpenShard, make) -> None:
    await make.closed(await open_shard("w0"), "a")
    with pytest.raises(LedgerError, match="session 'a' has not ended in this file"):
        await ledger.set_rewards("a", Rewards(final=0.0))
    assert (await ledger.trajectory("a")).rewards.final == 1.0


async def test_a_shards_sessions_are_found(ledger: Ledger, open_shard: OpenShard, make) -> None:
    await make.closed(await open_shard("w0"), "a", key_hash="cd" * 32)
    await make.closed(ledger.own, "b")
    await make.leased(ledger, 1, "a", "b")
    assert await ledger.ask(questions.session_with_key, "cd" * 32) == "a"
    assert [one.session_id for one in await ledger.ask(questions.leased, 1)] == ["a", "b"]


async def test_a_copy_beside_the_ledger_is_no_shard(ledger: Ledger, path: Path, make) -> None:
    await make.closed(ledger.own, "a")
    shutil.copy(path, path.with_name("ledger-backup.sqlite"))
    assert (await ledger.ask(questions.counts)).num_waiting == 1
    with pytest.raises(LedgerError, match="'backup' is not the name of a shard"):
        ledger.shard_path("backup")
