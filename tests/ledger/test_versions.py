"""Ledgers of other versions of the tables. versions/ has what each release really wrote (record.py).

1. a ledger of every version is verified, exported and resumed; 2. reading leaves its files as they are, also beside
their writer and in a read-only folder; 3. once opened for writing its files have today's tables, also when an upgrade
was interrupted between two files; 4. a shard that a worker of the older release still writes to is an error; 5. what
version 2 kept no digest of is reported as unproved, what it kept one of is checked, and no digest can be left out
later; 6. newer versions and versions too old to upgrade are refused; 7. tables cannot change without a new version.
"""

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from areal_agent.errors import LedgerError
from areal_agent.images import IMAGES
from areal_agent.ledger import questions
from areal_agent.ledger.__main__ import main
from areal_agent.ledger.files import OLDEST_VERSION, VERSION, FileKind, FileLock, shard_path
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import LedgerShard
from areal_agent.ledger.verify import Invariant, verify
from areal_agent.types import Fate, Rewards, Status

from .make import SAMPLING
from .test_export import exported

VERSIONS = range(OLDEST_VERSION, VERSION + 1)
FOLDER = Path(__file__).parent / "versions"


def restore(version: int, folder: Path) -> Path:
    """Rebuild the files of a ledger of one version."""
    for dump in sorted((FOLDER / str(version)).glob("*.sql")):
        with closing(sqlite3.connect(folder / f"{dump.stem}.sqlite")) as connection:
            connection.executescript(dump.read_text())
    if (images := FOLDER / str(version) / IMAGES).is_dir():  # from version 5 on
        shutil.copytree(images, folder / IMAGES)
    return folder / "ledger.sqlite"


@pytest.fixture(params=VERSIONS)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return restore(request.param, tmp_path)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A ledger of version 2."""
    return restore(2, tmp_path)


def change(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def tables(path: Path) -> set[tuple[object, ...]]:
    """Every column of a file with its type but without its default, every index, and the version."""
    with closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        columns = {
            (name, *column[:4], column[5])
            for name in names
            for column in connection.execute(f"PRAGMA table_info({name})")
        }
        indexes = set(connection.execute("SELECT name, tbl_name FROM sqlite_schema WHERE type = 'index'"))
        return {*columns, *indexes, tuple(connection.execute("PRAGMA user_version").fetchone())}


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a ledger, without the empty log that SQLite leaves for a reader."""
    return {path.name: path.read_bytes() for path in folder.glob("*.sqlite")}


def test_it_is_verified_and_left_as_it_is(recorded: Path) -> None:
    before = content(recorded.parent)
    report = verify(recorded)
    assert content(recorded.parent) == before
    assert report.violations == ()
    assert (report.num_turns, report.num_sampled_tokens, report.num_trained_tokens) == (17, 68, 8)
    assert report.counts is not None
    assert report.counts.statuses == {Status.COMPLETED: 7, Status.MISSING_REWARD: 1}
    assert (report.counts.num_trained, report.counts.num_leased, report.counts.num_waiting) == (1, 1, 4)


def test_it_is_exported(recorded: Path) -> None:
    rows = exported(recorded)
    assert len(rows) == 17
    fork = rows["forked-c1"]
    assert fork["prompt_token_ids"].tolist() == [1, 2, 3, 100, 101, 1, 2, 3]
    assert ([one["version"] for one in fork["versions"]], fork["is_delivered"]) == (["0:1", "1:2"], False)
    assert (fork["final_reward"], fork["reward_parts"]) == (0.5, [("format", 1.0)])
    assert rows["trained-c0"]["fate"] == "trained(1)"
    assert rows["sharded-c1"]["status"] is Status.COMPLETED


async def test_it_is_resumed(recorded: Path, make) -> None:
    ledger = await Ledger.open(recorded, create=False)
    incarnation = await ledger.begin_incarnation(1)
    assert (incarnation.number, incarnation.num_orphans, incarnation.num_returned) == (1, 2, 1)
    assert (await ledger.trajectory("forked")).turns[1].sampling == SAMPLING
    shard = await LedgerShard.open(shard_path(recorded, "w0"), create=True)
    await make.closed(shard, "new")
    await ledger.set_rewards("unpaid", Rewards(final=1.0))
    await make.leased(ledger, 2, "leased", "sharded", "new")
    await ledger.commit_checkpoint(2, "checkpoints/2")
    assert (await ledger.trajectory("sharded")).fate == Fate(trained_step=2)
    assert (await ledger.trajectory("unpaid")).status is Status.COMPLETED
    await shard.aclose()
    await ledger.aclose()
    assert verify(recorded).violations == ()


READ_AS_NOBODY = """
import os, sys
from pathlib import Path
from areal_agent.ledger.verify import verify
if os.getuid() == 0:  # root may write everywhere
    os.setuid(65534)
path = Path(sys.argv[1])
assert not os.access(path.parent, os.W_OK)
report = verify(path)
print(report.num_turns, report.violations)
"""


@pytest.fixture
def read_only(old: Path) -> Iterator[Path]:
    """Put its files into a folder that everybody may read and nobody may write to."""
    with tempfile.TemporaryDirectory() as folder:
        for path in old.parent.iterdir():
            copy = Path(folder) / path.name
            copy.write_bytes(path.read_bytes())
            copy.chmod(0o444)
        Path(folder).chmod(0o555)
        yield Path(folder) / old.name
        Path(folder).chmod(0o755)


def test_a_folder_that_cannot_be_written_to_is_read(read_only: Path) -> None:
    code = [sys.executable, "-c", READ_AS_NOBODY, str(read_only)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("17 ()\n", "")


def test_it_is_read_beside_its_writer(old: Path) -> None:
    with closing(sqlite3.connect(old, isolation_level=None)) as writer:
        writer.execute("UPDATE checkpoints SET path = 'elsewhere'")  # in the log only
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM endings")
        assert verify(old).violations == ()
        writer.execute("ROLLBACK")


@pytest.fixture
async def fresh(tmp_path: Path) -> Path:
    """A ledger with a shard, as they are made today."""
    path = tmp_path / "fresh" / "ledger.sqlite"
    path.parent.mkdir()
    await (await Ledger.open(path, create=True)).aclose()
    await (await LedgerShard.open(shard_path(path, "w0"), create=True)).aclose()
    return path


async def test_its_files_have_todays_tables_once_they_are_written_to(recorded: Path, fresh: Path) -> None:
    await (await Ledger.open(recorded, create=False)).aclose()
    assert tables(recorded) == tables(fresh)
    assert tables(shard_path(recorded, "w0")) == tables(shard_path(fresh, "w0"))


async def test_an_upgrade_goes_on_where_it_was_cut_off(old: Path) -> None:
    await (await LedgerShard.open(old, create=False, kind=FileKind.COORDINATOR)).aclose()  # its shard is not upgraded
    assert verify(old).violations == ()
    ledger = await Ledger.open(old, create=False)
    assert (await ledger.trajectory("sharded")).status is Status.COMPLETED
    await ledger.aclose()
    assert verify(old).violations == ()


async def test_an_upgrade_that_fails_leaves_the_file_as_it_was(old: Path) -> None:
    change(old, "DROP TABLE leases")
    before = tables(old)
    with pytest.raises(LedgerError, match="no such table: leases"):
        await Ledger.open(old, create=False)
    assert tables(old) == before


async def test_the_first_files_of_version_2_had_no_index_of_keys(old: Path) -> None:
    change(old, "DROP INDEX session_of_key")
    ledger = await Ledger.open(old, create=False)
    assert await ledger.ask(questions.session_with_key, "cd" * 32) == "unpaid"
    await ledger.aclose()


async def test_a_shard_of_an_older_version_that_is_written_to_is_an_error(old: Path) -> None:
    lock = FileLock.take(shard_path(old, "w0"), is_shard=True)
    with pytest.raises(LedgerError, match=r"a worker is still writing to ledger-w0\.sqlite"):
        await Ledger.open(old, create=False)
    lock.release()
    await (await Ledger.open(old, create=False)).aclose()


async def test_what_version_2_kept_no_digest_of_is_unproved(old: Path, make, capsys) -> None:
    unproved = {Invariant.ENDED: 8, Invariant.SAMPLED: 2}
    assert verify(old).unproved == unproved
    assert main(["verify", str(old)]) == 0
    out = capsys.readouterr().out
    assert "? every ending, with its rewards, is as it was written (cannot be proved for 8 sessions" in out
    assert out.endswith("OK: none of 16 invariants is violated, and 2 cannot be proved\n")
    ledger = await Ledger.open(old, create=False)
    await make.closed(ledger.own, "new")
    await ledger.set_rewards("unpaid", Rewards(final=1.0))  # what was logged in it stays unproved
    await make.leased(ledger, 2, "new")
    await ledger.aclose()
    report = verify(old)
    assert (report.violations, report.unproved) == ((), unproved)


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        ("UPDATE completions SET token_ids = zeroblob(16) WHERE id = 'trained-c1'", Invariant.SAMPLED),
        ("UPDATE endings SET digest = '' WHERE number = (SELECT max(number) FROM endings)", Invariant.ENDED),
    ],
)
async def test_what_can_be_proved_of_version_2_is(old: Path, make, damage: str, invariant: Invariant) -> None:
    ledger = await Ledger.open(old, create=False)
    await make.closed(ledger.own, "new", "newer")
    await ledger.aclose()
    change(old, damage)
    assert verify(old).of(invariant)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (99, rf"version 99 of the tables by a newer areal_agent, and this one reads versions 2 to {VERSION}; install"),
        (1, "version 1 of the tables by an older areal_agent, .* use the release that wrote it"),
    ],
)
async def test_a_version_that_cannot_be_read_is_refused(recorded: Path, version: int, message: str) -> None:
    for path in (shard_path(recorded, "w0"), recorded):
        change(path, f"PRAGMA user_version = {version}")
        with pytest.raises(LedgerError, match=message):
            await Ledger.open(recorded, create=False)
        with pytest.raises(LedgerError, match=message):
            await asyncio.to_thread(verify, recorded)


def test_tables_change_with_their_version(fresh: Path, tmp_path: Path) -> None:
    assert tables(fresh) == tables(restore(VERSION, tmp_path)), "raise VERSION, add to UPGRADES, run record.py"
