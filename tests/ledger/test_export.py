"""`ledger export --parquet` gives a researcher the data of a run.

1. there is one row per completion, from every file, with all that the ledger knows of it; 2. prompts are whole, also
after a fork, and tokens are those that were sampled; 3. a session that is open or has no reward has no figures of its
end; 4. the result does not depend on the size of row groups; 5. an existing file is kept unless `--force` is given;
6. a failure leaves nothing behind; 7. the command's own errors are one line and exit code 2.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from areal_agent.ledger.export import MAX_BATCH_TOKENS, completions, write_parquet
from areal_agent.ledger.files import LedgerFiles, shard_path
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import LedgerShard
from areal_agent.types import Drop, Rewards, VersionSpan, WeightVersion

from .conftest import UNREAD


async def recorded(ledger: Ledger, path: Path, make) -> None:
    """Record a trained session with a fork and an undelivered answer, a dropped one in a shard, and an open one."""
    spans = (
        VersionSpan(version=WeightVersion(step=1), start=0, end=3),
        VersionSpan(version=WeightVersion(incarnation=1, step=2), start=3, end=4),
    )
    fork = replace(make.completion("a-fork"), token_ids=(7, 8, 9, 2), versions=spans)
    await ledger.own.open_session(make.session("a"))
    await ledger.own.append_turn("a", make.turn("a", 0))
    await ledger.own.append_turn("a", make.turn("a", 1, parent="a-c0", fork_at=5, completions=(fork,)))
    rewards = Rewards(final=1.0, by_completion={"a-c0": 0.5}, parts={"format": 0.25})
    await ledger.own.close_session(make.ending("a", rewards=rewards, undelivered=("a-fork",)))
    shard = await LedgerShard.open(shard_path(path, "w0"), create=True)
    await make.closed(shard, "b", num_turns=1)
    await shard.aclose()
    await ledger.own.open_session(make.session("c"))
    await ledger.own.append_turn("c", make.turn("c", 0))
    await make.leased(ledger, 1, "a")
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await ledger.drop({"b": Drop.STALE})


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_agent.ledger", "export", *map(str, arguments)], capture_output=True, text=True
    )


async def test_a_row_a_completion_with_all_that_is_known(ledger: Ledger, path: Path, tmp_path: Path, make) -> None:
    await recorded(ledger, path, make)
    done = command(path.parent, "--parquet", tmp_path / "out.parquet")
    assert done.returncode == 0
    assert done.stderr == "without their text: no tokenizer was found; name its folder with --tokenizer\n"
    assert done.stdout.startswith("4 completions in ")
    rows = {row["completion_id"]: row for row in pq.read_table(tmp_path / "out.parquet").to_pylist()}
    assert rows.keys() == {"a-c0", "a-fork", "b-c0", "c-c0"}
    assert rows["a-fork"] == {
        "session_id": "a",
        "group_id": "g000000",
        "task_id": "task-1",
        "purpose": "train",
        "status": "completed",
        "fate": "trained(1)",
        "trained_step": 1,
        "turn": "a-t1",
        "turn_index": 1,
        "parent": "a-c0",
        "fork_reason": None,
        "completion_id": "a-fork",
        "prompt_token_ids": [1, 2, 3, 100, 101, 1, 2, 3],
        "token_ids": [7, 8, 9, 2],
        "logprobs": [-0.5] * 4,
        "versions": [{"version": "0:1", "start": 0, "end": 3}, {"version": "1:2", "start": 3, "end": 4}],
        "finish_reason": "stop",
        "distribution": "exact",
        "is_delivered": False,
        "reward": None,
        "final_reward": 1.0,
        "reward_parts": [("format", 0.25)],
        "messages": '[{"role":"user","content":"what is 2 + 2?"},{"role":"assistant","content":null},'
        '{"role":"user","content":"what is 2 + 2?"}]',
        "text": None,
        "started_s": make.START_S + 2,
        "ended_s": make.START_S + 3,
    }
    assert (rows["a-c0"]["reward"], rows["a-c0"]["is_delivered"]) == (0.5, True)
    assert (rows["b-c0"]["fate"], rows["b-c0"]["trained_step"]) == ("dropped(stale)", None)


async def test_an_open_session_has_no_figures_of_an_end(ledger: Ledger, path: Path, make) -> None:
    await recorded(ledger, path, make)
    files = LedgerFiles(path)
    with files.snapshot() as snapshot:
        [row] = [row for row in completions(snapshot, UNREAD) if row["session_id"] == "c"]
    files.close()
    assert [row[name] for name in ("status", "fate", "final_reward", "reward_parts")] == [None] * 4
    assert row["prompt_token_ids"].tolist() == [1, 2, 3]


async def test_row_groups_are_all_written(ledger: Ledger, path: Path, tmp_path: Path, make) -> None:
    big = replace(make.completion("big-c0", num_tokens=MAX_BATCH_TOKENS))
    await ledger.own.open_session(make.session("big"))
    await ledger.own.append_turn("big", make.turn("big", completions=(big,)))
    await make.closed(ledger.own, *(f"s{number}" for number in range(5)))
    files = LedgerFiles(path)
    with files.snapshot() as snapshot:
        assert write_parquet(tmp_path / "out.parquet", completions(snapshot, UNREAD)) == 11
    files.close()
    written = pq.ParquetFile(tmp_path / "out.parquet")
    assert [written.metadata.row_group(number).num_rows for number in range(written.num_row_groups)] == [1, 10]


async def test_a_file_that_is_there_is_kept_unless_forced(ledger: Ledger, path: Path, tmp_path: Path, make) -> None:
    await recorded(ledger, path, make)
    target = tmp_path / "out.parquet"
    target.write_text("precious")
    refused = command(path.parent, "--parquet", target)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "exists; name another file, or replace it with --force" in refused.stderr
    assert target.read_text() == "precious"
    assert command(path.parent, "--parquet", target, "--force").returncode == 0
    assert pq.read_table(target).num_rows == 4


async def test_a_failure_leaves_nothing_behind(ledger: Ledger, path: Path, tmp_path: Path, make) -> None:
    await recorded(ledger, path, make)

    def failing():
        with files.snapshot() as snapshot:
            yield next(completions(snapshot, UNREAD))
        raise RuntimeError("the disk is full")

    (tmp_path / "out").mkdir()
    files = LedgerFiles(path)
    with pytest.raises(RuntimeError, match="the disk is full"):
        write_parquet(tmp_path / "out" / "out.parquet", failing())
    files.close()
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "export needs a file to write: --parquet FILE"),
        (["--parquet", "."], "must be a file in an existing folder"),
        (["--parquet", "missing/out.parquet"], "must be a file in an existing folder"),
    ],
)
async def test_its_own_errors_are_one_line(ledger: Ledger, path: Path, arguments: list[str], message: str) -> None:
    done = command(path.parent, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr
