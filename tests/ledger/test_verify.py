"""`ledger verify` checks the invariants and finds each violation.

1. a run with sessions in every state is in order (test_versions.py has its figures), and so is a completed one; 2.
each planted corruption is found under the invariant that it violates, also in a shard, or between files; 3. a file too
damaged to read on is a violation, not a traceback; 4. it works beside the live writer, and sees one state; 5. an ending
that was changed takes no reward; 6. the command prints a report and exits with 0, or with 1 and the violation; a
missing folder or ledger is refused; 7. the places of images are proved, that their files are whole, and that messages
refer to them.
"""

import asyncio
import hashlib
import json
import sqlite3
import struct
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from areal_agent.errors import ConfigError, LedgerError
from areal_agent.images import IMAGES, ImageFolder, reference_to
from areal_agent.ledger.__main__ import main
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.files import shard_path
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import Invariant, verify
from areal_agent.types import Drop, ImageSpan, Rewards

from .make import Make


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
    "a value of another type": (Invariant.READABLE, "UPDATE turns SET fork_at = x'01' WHERE number = 1"),
    "a table that is none": (
        Invariant.INTACT,
        "UPDATE sqlite_schema SET sql = CAST(x'435245415445205441424c45ff' AS TEXT) WHERE name = 'leases'",
    ),
}


@pytest.fixture
async def with_leased_shard(recorded: Path, make: Make) -> Path:
    """The same ledger, after its shard's closed session was leased."""
    ledger = await Ledger.open(recorded, create=False)
    await make.leased(ledger, 2, "sharded")
    await ledger.aclose()
    assert verify(recorded).violations == ()
    return recorded


def change(path: Path, script: str) -> int:
    """Change a row that the ledger's own code never would; return how many rows were changed."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("PRAGMA writable_schema = ON")
        return connection.execute(script).rowcount


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_planted_corruption_is_found(recorded: Path, name: str) -> None:
    invariant, script = CORRUPTIONS[name]
    assert change(recorded, script) == 1
    assert verify(recorded).of(invariant)


PICTURE = hashlib.sha256(b"a picture").hexdigest()


@pytest.mark.parametrize(
    ("spans", "detail"),
    [
        ([(1, 1)], "an image has the tokens [1, 1) of 3"),
        ([(2, 4)], "an image has the tokens [2, 4) of 3"),
        ([(1, 2), (1, 2)], "has the tokens [1, 2) of 3, where the one before ends at 2"),
        ([(0, 2)], "an image has the ids [1, 2], and in turn 'forked-t1' it is 1 that stands for images"),
        ([(0, 1), (1, 2)], "an image has the ids [2], and in turn 'forked-t1' it is 1 that stands for images"),
    ],
)
def test_images_in_the_wrong_place_are_found(recorded: Path, spans: list[tuple[int, int]], detail: str) -> None:
    images = json.dumps([(PICTURE, *span) for span in spans])
    assert change(recorded, f"UPDATE turns SET images = '{images}' WHERE id = 'forked-t1'") == 1
    [violation] = verify(recorded).violations
    assert violation.invariant is Invariant.IMAGES
    assert detail in violation.detail


REFERS = "turn 's-t0': its messages refer to sha256:{} {} times, and its prompt has it {} times"


@pytest.mark.parametrize(
    ("asked", "fork_at", "found"),
    [
        ([PICTURE], 7, []),
        ([PICTURE], 2, [f"turn 's-t1': it cuts image {PICTURE}"]),
        ([], 7, [REFERS.format(PICTURE, 0, 1)]),
        ([PICTURE, PICTURE], 7, [REFERS.format(PICTURE, 2, 1)]),
        (["a" * 64], 7, [REFERS.format(PICTURE, 0, 1), REFERS.format("a" * 64, 1, 0)]),
    ],
)
async def test_images_of_messages(recorded: Path, make: Make, asked: list[str], fork_at: int, found: list[str]) -> None:
    """A fork that cuts one is found, and references to others, in the turn that has them, not in those after it."""
    image, delta = ImageSpan(digest=PICTURE, start=0, end=3), {"role": "user", "content": [*map(reference_to, asked)]}
    ledger = await Ledger.open(recorded, create=False)
    await ledger.own.open_session(make.session("s"))
    first = make.turn("s", new_prompt_ids=(2, 2, 2), images=(image,), request_delta=(delta,))
    for one in (first, make.turn("s", 1, fork_at=fork_at)):
        await ledger.own.append_turn("s", one)
    await ledger.aclose()
    report = verify(recorded)
    assert [str(one) for one in report.violations] == found
    assert (report.num_images, report.num_image_bytes) == (1, len(b"a picture"))


@pytest.mark.parametrize("content", [None, b"another one"])
def test_an_image_that_is_not_whole_is_found(recorded: Path, content: bytes | None, capsys) -> None:
    file = ImageFolder(recorded.with_name(IMAGES)).file(PICTURE)
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    code, out = command(capsys, recorded.parent)
    assert code == 1
    assert f"turn 'forked-t1': image {PICTURE} {'is damaged' if content else 'cannot be read'}" in out
    assert "VIOLATED: 1 of 16 invariants; 1 violations" in out


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


async def test_an_ending_that_was_changed_takes_no_late_reward(recorded: Path) -> None:
    change(recorded, ending("waiting", "final_reward = 0.5"))
    async with aclosing(await Ledger.open(recorded, create=False)) as ledger:
        with pytest.raises(LedgerError, match="was changed after it was written"):
            await ledger.set_rewards("waiting", Rewards(final=2.0))


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
def test_what_is_wrong_with_a_shard_is_found(with_leased_shard: Path, name: str) -> None:
    invariant, script = BETWEEN_FILES[name]
    assert change(shard_path(with_leased_shard, "w0"), script) >= 1
    assert verify(with_leased_shard).of(invariant)


def command(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, str]:
    """Return the command's exit code and what it printed."""
    code = main(["verify", str(path)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def test_the_command_reports_a_run(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = command(capsys, recorded.parent)
    assert code == 0
    assert "68 sampled in 17 turns; 8 trained in the loss\n  images     1 of 9 bytes\n" in out
    assert "1 trained, 1 dropped (1 stale); 1 leased, 4 waiting" in out
    assert out.endswith("OK: all 16 invariants hold\n")


async def test_the_command_says_that_nothing_is_recorded(ledger: Ledger, path: Path, capsys) -> None:
    code, out = command(capsys, path.parent)
    assert code == 0
    assert "EMPTY: nothing is recorded here, so nothing is proved" in out
    assert "OK" not in out


def test_the_command_exits_1_and_names_the_violation(recorded: Path, capsys) -> None:
    change(recorded, "UPDATE notes SET value = '\"completed\"'")
    code, out = command(capsys, recorded.parent)
    assert code == 1
    assert "✗ a completed run leaves nothing open, waiting or leased" in out
    assert "the run: it is completed, yet 4 of its sessions are waiting" in out
    assert "VIOLATED: 1 of 16 invariants" in out


@pytest.mark.parametrize(("name", "message"), [("missing", "there is no run folder"), (".", "has no ledger.sqlite")])
def test_what_is_not_there_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["verify", str(tmp_path / name)])
