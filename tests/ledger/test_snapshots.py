"""Snapshots of a ledger with shards, made while it is written, and what is restored from them.

1. a restored ledger has what the last part had seen, of all files, and is proved; 2. the next part has what was added
alone, and shards made since; none stays of an incarnation before; 3. damage is named, and what came before it is
restored; 4. an incarnation that was taken over publishes none, and the next one after a restore is later than every
claim; 5. a failed write leaves the snapshot as it was.
"""

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import LedgerError, TakenOver
from areal_agent.files import claim
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading, shard_path
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.questions import LedgerCounts
from areal_agent.ledger.shard import LedgerShard
from areal_agent.ledger.snapshots import SnapshotFolder, restore
from areal_agent.ledger.verify import verify


@pytest_asyncio.fixture
async def shards(ledger: Ledger, path: Path) -> AsyncIterator[list[LedgerShard]]:
    opened = [await LedgerShard.open(shard_path(path, name), create=True) for name in ("w0", "w1")]
    yield opened
    for shard in opened:
        await shard.aclose()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    for name in ("ledger", "checkpoints"):
        (tmp_path / "shared" / name).mkdir(parents=True)
    return tmp_path / "shared"


def snapshots(path: Path, shared: Path, incarnation: int = 0) -> SnapshotFolder:
    return SnapshotFolder(path, shared / "ledger", checkpoints=shared / "checkpoints", incarnation=incarnation)


def restored(shared: Path, folder: Path, claimed: int = 0) -> Path:
    folder.mkdir()
    restore(shared / "ledger", folder / "ledger.sqlite", claimed=claimed)
    assert verify(folder / "ledger.sqlite").violations == ()
    return folder / "ledger.sqlite"


def counts(path: Path) -> LedgerCounts:
    with reading(path) as snapshot:
        return questions.counts(snapshot)


async def test_a_ledger_that_is_written_is_restored_in_one_state(
    ledger: Ledger, shards: list[LedgerShard], path: Path, shared: Path, tmp_path: Path, make
) -> None:
    kept = snapshots(path, shared)

    async def write(shard: LedgerShard, name: str) -> None:
        for number in itertools.count():
            await make.closed(shard, f"{name}-{number}")
            if number % 2:
                await make.leased(ledger, step, f"{name}-{number}")

    step = 1
    writers = [asyncio.create_task(write(shard, name)) for shard, name in zip(shards, "ab", strict=True)]
    for step in (1, 2, 3):
        while (before := await ledger.ask(questions.counts)).num_leased < 4 * step:
            pass
        await asyncio.to_thread(kept.add, step)
        after = await ledger.ask(questions.counts)
        found = counts(restored(shared, tmp_path / f"restored-{step}"))
        assert before.num_leased <= found.num_leased <= after.num_leased
        assert before.num_closed <= found.num_closed <= after.num_closed
    for writer in writers:
        writer.cancel()
    await asyncio.wait(writers)


async def test_a_part_has_only_what_was_added(
    ledger: Ledger, shards: list[LedgerShard], path: Path, shared: Path, tmp_path: Path, make
) -> None:
    await make.closed(shards[0], *(f"a{number}" for number in range(200)))
    kept = snapshots(path, shared)
    first = kept.add(1)
    await make.closed(shards[0], "b")
    later = await LedgerShard.open(shard_path(path, "w2"), create=True)
    await make.closed(later, "c")
    await later.aclose()
    second = kept.add(2)
    sizes = [(part / "ledger-w0.sqlite").stat().st_size for part in (first, second)]
    assert sizes[1] < sizes[0] / 3
    assert counts(restored(shared, tmp_path / "restored")).num_waiting == 202
    snapshots(path, shared, incarnation=1).add(2)
    assert [part.name for part in (shared / "ledger").iterdir()] == ["000001-000001"]
    assert counts(restored(shared, tmp_path / "again")).num_waiting == 202


async def test_damage_is_named_and_what_came_before_is_restored(
    ledger: Ledger, path: Path, shared: Path, tmp_path: Path, make
) -> None:
    kept = snapshots(path, shared)
    await make.closed(ledger.own, "a")
    kept.add(1)
    await make.closed(ledger.own, "b")
    damaged = kept.add(2)
    os.truncate(damaged / "ledger.sqlite", 100)
    with pytest.raises(LedgerError, match=rf"{damaged}.*delete that part"):
        restored(shared, tmp_path / "damaged")
    shutil.rmtree(damaged)
    assert counts(restored(shared, tmp_path / "restored")).num_waiting == 1
    shutil.rmtree(shared / "ledger" / "000000-000001")
    with pytest.raises(LedgerError, match="lost before its first checkpoint"):
        restored(shared, tmp_path / "none")


async def test_who_was_taken_over_publishes_none(
    ledger: Ledger, path: Path, shared: Path, tmp_path: Path, make
) -> None:
    kept = snapshots(path, shared, incarnation=2)
    claim(shared / "checkpoints", 2)
    await make.closed(ledger.own, "a")
    kept.add(1)
    claim(shared / "checkpoints", 5)
    with pytest.raises(TakenOver, match=r"incarnation 5 of this run \(.+, process \d+\) has claimed"):
        kept.add(2)
    assert [part.name for part in (shared / "ledger").iterdir()] == ["000002-000001"]
    again = await Ledger.open(restored(shared, tmp_path / "restored", claimed=5), create=False)
    assert await again.ask(questions.newest_incarnation) == 5
    await again.aclose()


async def test_a_snapshot_that_cannot_be_written_leaves_the_one_before(
    ledger: Ledger, path: Path, shared: Path, tmp_path: Path, make
) -> None:
    kept = snapshots(path, shared)
    await make.closed(ledger.own, "a")
    kept.add(1)
    (shared / "ledger").rename(shared / "away")
    await make.closed(ledger.own, "b")
    with pytest.raises(LedgerError, match=r"snapshot in .* could not be written"):
        kept.add(2)
    assert not (shared / "ledger").exists()
    (shared / "away").rename(shared / "ledger")
    kept.add(2)
    assert counts(restored(shared, tmp_path / "restored")).num_waiting == 2
