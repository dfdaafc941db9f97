"""`ledger verify` checks the invariants and finds each violation.

1. a run in mid-life is in order, and so is a completed one, with the right figures; 2. each planted corruption is
found under the invariant that it violates; 3. a file too damaged to read on is a violation, not a traceback; 4. it
works beside the live writer, and sees one state; 5. faults in a shard, or between files, are found too; 6. the
command prints a report and exits with 0, or with 1 and the violation; 7. a missing folder or ledger is one line and
exit code 2.
"""

import asyncio
import shutil
import sqlite3
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_agent.ledger import questions
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.files import shard_path
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import LedgerShard
from areal_agent.ledger.verify import Invariant, verify
from areal_agent.types import Drop, SessionPurpose, VersionSpan, WeightVersion
from tests.histories import open_ledger

from .conftest import Make


async def live(ledger: Ledger, make) -> None:
    """Record a session in every state, one of them with a fork and a completion of two weight versions."""
    await make.closed(ledger.own, "trained", "leased", "dropped", "waiting")
    await make.closed(ledger.own, "eval", purpose=SessionPurpose.EVAL)
    spans = (
        VersionSpan(version=WeightVersion(step=1), start=0, end=3),
        VersionSpan(version=WeightVersion(step=2), start=3, end=4),
    )
    await ledger.own.open_session(make.session("open"))
    await ledger.own.append_turn("open", make.turn("open", 0))
    await ledger.own.append_turn("open", make.turn("open", 1))
    fork = replace(make.completion("open-fork"), versions=spans)
    await ledger.own.append_turn("open", make.turn("open", 2, parent="open-c0", fork_at=5, completions=(fork,)))
    await make.leased(ledger, 1, "trained")
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await make.leased(ledger, 2, "leased")
    await ledger.drop({"dropped": Drop.STALE})


async def test_a_live_run_is_in_order(ledger: Ledger, path: Path, make) -> None:
    await live(ledger, make)
    report = verify(path)
    assert report.violations == ()
    assert report.num_turns == 13
    assert report.num_sampled_tokens == 13 * 4
    assert report.num_trained_tokens == 8
    assert report.counts == await ledger.ask(questions.counts)


async def test_a_completed_run_is_in_order(ledger: Ledger, path: Path, make) -> None:
    await make.closed(ledger.own, "a", "b")
    await make.leased(ledger, 1, "a")
    await ledger.drop({"b": Drop.FILTERED})
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await ledger.set_note("status", "completed")
    await ledger.aclose()
    assert verify(path).is_ok


def blob(*values: float) -> str:
    return f"x'{struct.pack(f'<{len(values)}f', *values).hex()}'"


def ending(session: str, change: str) -> str:
    return f"UPDATE endings SET {change} WHERE session = (SELECT number FROM sessions WHERE id = '{session}')"


def answer(change: str) -> str:
    return f"UPDATE completions SET {change} WHERE id = 'trained-c1'"


def turn(change: str) -> str:
    return f"UPDATE turns SET {change} WHERE id = 'trained-t1'"


def lease(change: str) -> str:
    return f"UPDATE leases SET {change} WHERE session = 'trained'"


CORRUPTIONS = {
    "a turn of no session": (Invariant.INTACT, turn("session = 999")),
    "a lease of no session": (Invariant.KNOWN, "INSERT INTO leases VALUES ('ghost', 9, 'd', 1)"),
    "a fate of no session": (Invariant.KNOWN, "INSERT INTO fates VALUES ('ghost', NULL, 'stale')"),
    "what was never sampled is undelivered": (Invariant.DELIVERY, ending("trained", "undelivered = '[\"leased-c0\"]'")),
    "undelivered answers that are no list": (Invariant.READABLE, ending("waiting", "undelivered = '{}'")),
    "a fate of an orphan": (Invariant.ONE_FATE, ending("trained", "status = 'orphan'")),
    "a status of no name": (Invariant.READABLE, ending("waiting", "status = 'fine'")),
    "rewards that are no JSON": (Invariant.READABLE, ending("waiting", "rewards = '{'")),
    "rewards that are a list": (Invariant.READABLE, ending("waiting", "rewards = '[]'")),
    "a torn blob": (Invariant.READABLE, answer("token_ids = x'00000000000000'")),
    "sampling that is none": (Invariant.READABLE, turn("sampling = '{}'")),
    "spans that are none": (Invariant.READABLE, answer("versions = '[[1, 2]]'")),
    "a drop of no name": (Invariant.READABLE, "UPDATE fates SET dropped = 'lost' WHERE dropped IS NOT NULL"),
    "a fate of an open session": (Invariant.ONE_FATE, "INSERT INTO fates VALUES ('open', NULL, 'stale')"),
    "a lease of an open session": (Invariant.ONE_FATE, "INSERT INTO leases VALUES ('open', 9, 'd', 1)"),
    "a fate of an evaluation": (Invariant.ONE_FATE, "INSERT INTO fates VALUES ('eval', NULL, 'stale')"),
    "a lease of an evaluation": (Invariant.ONE_FATE, "INSERT INTO leases VALUES ('eval', 9, 'd', 1)"),
    "dropped and leased": (Invariant.ONE_FATE, "INSERT INTO leases VALUES ('dropped', 9, 'd', 1)"),
    "two fates in one": (Invariant.ONE_FATE, "UPDATE fates SET trained_step = 1 WHERE session = 'dropped'"),
    "a fate of nothing": (Invariant.ONE_FATE, "UPDATE fates SET dropped = NULL WHERE session = 'dropped'"),
    "trained without a lease": (Invariant.TRAINED, "DELETE FROM leases WHERE session = 'trained'"),
    "trained in another step": (Invariant.TRAINED, lease("step = 0")),
    "trained beyond the checkpoint": (Invariant.TRAINED, "DELETE FROM checkpoints"),
    "leased below the checkpoint": (Invariant.TRAINED, "INSERT INTO checkpoints VALUES (2, 'p')"),
    "completed with left-overs": (Invariant.FINISHED, "UPDATE notes SET value = '\"completed\"'"),
    "another token": (Invariant.SAMPLED, answer("token_ids = x'01000000010000000100000001000000'")),
    "another probability": (Invariant.SAMPLED, answer(f"logprobs = {blob(-0.25, -0.25, -0.25, -0.25)}")),
    "a lost turn": (Invariant.SAMPLED, "DELETE FROM completions WHERE id = 'trained-c1'"),
    "more loss tokens than sampled": (Invariant.SAMPLED, lease("num_loss_tokens = 9")),
    "no loss token": (Invariant.SAMPLED, lease("num_loss_tokens = 0")),
    "another number of loss tokens": (Invariant.SAMPLED, lease("num_loss_tokens = 7")),
    "another reward of what is trained": (Invariant.SAMPLED, ending("trained", "final_reward = 0.5")),
    "a reward of one answer of what is trained": (
        Invariant.SAMPLED,
        ending("trained", "rewards = '{\"trained-c0\": 1.0}'"),
    ),
    "another reward of an evaluation": (Invariant.ENDED, ending("eval", "final_reward = 0.5")),
    "a reward that is gone": (Invariant.ENDED, ending("waiting", "final_reward = NULL")),
    "another part of a reward": (Invariant.ENDED, ending("waiting", "parts = '{\"style\": 1.0}'")),
    "another status": (Invariant.ENDED, ending("waiting", "status = 'error'")),
    "another digest of an ending": (Invariant.ENDED, ending("waiting", "digest = 'none'")),
    "an ending that lost its digest": (Invariant.ENDED, ending("waiting", "digest = ''")),
    "too few probabilities": (Invariant.LENGTHS, answer(f"logprobs = {blob(-0.5)}")),
    "a probability that is none": (Invariant.LOGPROBS, answer(f"logprobs = {blob(-0.5, float('nan'), -0.5, -0.5)}")),
    "a probability above 1": (Invariant.LOGPROBS, answer(f"logprobs = {blob(-0.5, -0.5, 0.1, -0.5)}")),
    "an impossible token": (Invariant.LOGPROBS, answer(f"logprobs = {blob(-0.5, -0.5, -float('inf'), -0.5)}")),
    "a gap between spans": (Invariant.SPANS, answer('versions = \'[["0:0",0,1],["0:0",2,4]]\'')),
    "spans that overlap": (Invariant.SPANS, answer('versions = \'[["0:0",0,3],["0:0",2,4]]\'')),
    "spans too short": (Invariant.SPANS, answer("versions = '[[\"0:0\",0,3]]'")),
    "no span": (Invariant.SPANS, answer("versions = '[]'")),
    "versions that go back": (Invariant.SPANS, answer('versions = \'[["0:2",0,2],["0:1",2,4]]\'')),
    "a parent that is not there": (Invariant.LINEAGE, turn("parent = 'nobody'")),
    "a parent of another session": (Invariant.LINEAGE, turn("parent = 'leased-c0'")),
    "a parent of later": (Invariant.LINEAGE, "UPDATE turns SET parent = 'trained-c1' WHERE id = 'trained-t0'"),
    "a fork behind the end": (Invariant.LINEAGE, turn("fork_at = 8")),
    "a fork before the start": (Invariant.LINEAGE, turn("fork_at = -1")),
    "a root that keeps tokens": (Invariant.LINEAGE, turn("parent = NULL")),
    "a turn that ends before it starts": (Invariant.TIMES, turn("ended_s = started_s - 60")),
    "a turn before its parent": (Invariant.TIMES, turn("started_s = started_s - 60")),
    "a session that starts after its turns": (
        Invariant.TIMES,
        "UPDATE sessions SET started_s = started_s + 60 WHERE id = 'trained'",
    ),
    "a session that ends before its turns": (Invariant.TIMES, ending("trained", "ended_s = ended_s - 2000")),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a closed ledger with a session in every state, and a shard with a leased one."""
    path = tmp_path_factory.mktemp("recorded") / "ledger.sqlite"

    async def record() -> None:
        make = Make()
        async with open_ledger(path.parent) as ledger:
            shard = await LedgerShard.open(ledger.shard_path("w0"), create=True)
            await make.closed(shard, "sharded")
            await live(ledger, make)
            await make.leased(ledger, 2, "sharded")
            await shard.aclose()

    asyncio.run(record())
    return path


@pytest.fixture
def copied(recorded: Path, path: Path) -> Path:
    """Copy that ledger, to be damaged."""
    for file in recorded.parent.glob("*.sqlite"):
        shutil.copy(file, path.parent)
    return path


def test_the_copy_is_in_order(copied: Path) -> None:
    assert verify(copied).violations == ()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_planted_corruption_is_found(copied: Path, name: str) -> None:
    invariant, change = CORRUPTIONS[name]
    connection = sqlite3.connect(copied, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    assert connection.execute(change).rowcount == 1
    connection.close()
    assert verify(copied).of(invariant)


async def test_a_lease_of_more_tokens_than_were_sampled_is_found(ledger: Ledger, path: Path, make) -> None:
    await make.closed(ledger.own, "a")
    await ledger.lease(1, [Lease.of(await ledger.trajectory("a"), 9)])
    [violation] = verify(path).violations
    assert (violation.invariant, violation.detail) == (Invariant.SAMPLED, "9 of its 8 sampled tokens are in the loss")


def deface(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: 4096 * 3].ljust(len(content), b"\xff"))


async def test_a_file_too_damaged_to_read_is_a_violation(ledger: Ledger, path: Path, make) -> None:
    await make.closed(ledger.own, *(f"s{number}" for number in range(30)))
    await ledger.aclose()
    deface(path)
    assert verify(path).of(Invariant.INTACT)


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        ("UPDATE turns SET fork_at = x'01' WHERE number = 1", Invariant.READABLE),
        (
            "UPDATE sqlite_schema SET sql = CAST(x'435245415445205441424c45ff' AS TEXT) WHERE name = 'leases'",
            Invariant.INTACT,
        ),
    ],
)
async def test_values_of_no_type_of_theirs_are_a_violation(ledger: Ledger, path: Path, make, damage, invariant) -> None:
    await live(ledger, make)
    await ledger.aclose()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(damage)
    connection.commit()
    connection.close()
    assert verify(path).of(invariant)


async def test_it_sees_one_state_beside_the_live_writer(ledger: Ledger, path: Path, make) -> None:
    async def write() -> None:
        for number in range(20):
            await make.closed(ledger.own, f"s{number}")
            await make.leased(ledger, number + 1, f"s{number}")
            await ledger.commit_checkpoint(number + 1, "checkpoints")

    writing = asyncio.create_task(write())
    reports = []
    while not writing.done():
        reports.append(await asyncio.to_thread(verify, path))
    await writing
    assert [report.violations for report in reports] == [()] * len(reports)
    assert reports[0].num_turns < verify(path).num_turns == 40


BETWEEN_FILES = {
    "a session of two files": (Invariant.UNIQUE, "UPDATE sessions SET id = 'trained' WHERE id = 'sharded'"),
    "an answer of two files": (Invariant.UNIQUE, "UPDATE completions SET id = 'trained-c0' WHERE id = 'sharded-c0'"),
    "a leased session that is gone": (Invariant.KNOWN, "UPDATE sessions SET id = 'other' WHERE id = 'sharded'"),
    "another token in a shard": (Invariant.SAMPLED, "UPDATE completions SET token_ids = zeroblob(16)"),
    "a leased session that is open": (Invariant.ONE_FATE, "DELETE FROM endings"),
    "a leased session that is an orphan": (Invariant.ONE_FATE, "UPDATE endings SET status = 'orphan'"),
    "a turn of no session in a shard": (Invariant.INTACT, "UPDATE turns SET session = 999 WHERE id = 'sharded-t1'"),
}


@pytest.mark.parametrize("name", BETWEEN_FILES)
def test_what_is_wrong_with_a_shard_is_found(copied: Path, name: str) -> None:
    invariant, change = BETWEEN_FILES[name]
    connection = sqlite3.connect(shard_path(copied, "w0"), isolation_level=None)
    assert connection.execute(change).rowcount >= 1
    connection.close()
    assert verify(copied).of(invariant)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_agent.ledger", *map(str, arguments)], capture_output=True, text=True
    )


async def test_the_command_reports_a_live_run(ledger: Ledger, path: Path, make) -> None:
    await live(ledger, make)
    done = command("verify", path.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "52 sampled in 13 turns; 8 trained in the loss" in done.stdout
    assert "1 trained, 1 dropped (1 stale); 1 leased, 1 waiting" in done.stdout
    assert done.stdout.endswith("OK: all 15 invariants hold\n")


async def test_the_command_says_that_nothing_is_recorded(ledger: Ledger, path: Path) -> None:
    done = command("verify", path.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "EMPTY: nothing is recorded here, so nothing is proved" in done.stdout
    assert "OK" not in done.stdout


async def test_the_command_exits_1_and_names_the_violation(ledger: Ledger, path: Path, make) -> None:
    await live(ledger, make)
    await ledger.set_note("status", "completed")
    done = command("verify", path.parent)
    assert (done.returncode, done.stderr) == (1, "")
    assert "✗ a completed run leaves nothing open, waiting or leased" in done.stdout
    assert "the run: it is completed, yet 1 of its sessions are waiting" in done.stdout
    assert "VIOLATED: 1 of 15 invariants" in done.stdout


@pytest.mark.parametrize(("name", "message"), [("missing", "there is no run folder"), (".", "has no ledger.sqlite")])
def test_what_is_not_there_is_one_line_and_exit_2(tmp_path: Path, name: str, message: str) -> None:
    done = command("verify", tmp_path / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1
