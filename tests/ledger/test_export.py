"""`ledger export --parquet` gives a researcher the data of a run.

1. there is one row per completion, from every file, with all that the ledger knows of it, and its images on request;
2. prompts are whole, also after a fork, and tokens are those that were sampled; 3. a session that is open or has no
reward has no figures of its end; 4. the result does not depend on the size of row groups; 5. an existing file is kept
unless `--force` is given; 6. a failure leaves nothing behind; 7. a file that cannot be written is refused before
anything is read.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from areal_agent.errors import ConfigError
from areal_agent.images import ImageFolder, reference_to
from areal_agent.ledger.__main__ import main
from areal_agent.ledger.export import MAX_BATCH_TOKENS, completions, write_parquet
from areal_agent.ledger.files import LedgerFiles
from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.transcript import Transcript, TranscriptSettings

from .test_verify import PICTURE

NO_TOKENIZER = Transcript(TranscriptSettings(tokenizer=""))


def exported(path: Path) -> dict[str, dict[str, Any]]:
    """Return a ledger's rows by completion."""
    with closing(LedgerFiles(path)) as files, files.snapshot() as snapshot:
        return {row["completion_id"]: row for row in completions(snapshot, NO_TOKENIZER)}


def test_a_row_a_completion_with_all_that_is_known(recorded: Path, make, capsys: pytest.CaptureFixture[str]) -> None:
    target, images = recorded.with_name("out.parquet"), recorded.with_name("out")
    assert main(["export", str(recorded.parent), "--parquet", str(target), "--images", str(images)]) == 0
    assert ImageFolder(images).read(PICTURE) == b"a picture"
    out, err = capsys.readouterr()
    assert err == "without their text: no tokenizer was found; name its folder with --tokenizer\n"
    assert out.startswith("17 completions in ")
    rows = {row["completion_id"]: row for row in pq.read_table(target).to_pylist()}
    assert len(rows) == 17
    assert rows["forked-c1"] == {
        "session_id": "forked",
        "group_id": "g000000",
        "task_id": "task-1",
        "purpose": "train",
        "status": "completed",
        "fate": None,
        "trained_step": None,
        "turn": "forked-t1",
        "turn_index": 1,
        "parent": "forked-c0",
        "fork_reason": None,
        "completion_id": "forked-c1",
        "prompt_token_ids": [1, 2, 3, 100, 101, 1, 2, 3],
        "images": [{"digest": PICTURE, "start": 6, "end": 7}],
        "token_ids": [100, 101, 102, 103],
        "logprobs": [-0.5] * 4,
        "versions": [{"version": "0:1", "start": 0, "end": 3}, {"version": "1:2", "start": 3, "end": 4}],
        "finish_reason": "stop",
        "distribution": "altered",
        "is_delivered": False,
        "reward": None,
        "final_reward": 0.5,
        "reward_parts": [("format", 1.0)],
        "messages": orjson.dumps(
            [
                {"role": "user", "content": "what is 2 + 2?"},
                {"role": "assistant", "content": None},
                {"role": "user", "content": [{"type": "text", "text": "what is it?"}, reference_to(PICTURE)]},
            ]
        ).decode(),
        "text": None,
        "started_s": make.START_S + 2,
        "ended_s": make.START_S + 3,
    }
    assert (rows["forked-c0"]["reward"], rows["forked-c0"]["is_delivered"]) == (0.25, True)
    assert (rows["trained-c0"]["fate"], rows["trained-c0"]["trained_step"]) == ("trained(1)", 1)
    assert (rows["dropped-c0"]["fate"], rows["dropped-c0"]["trained_step"]) == ("dropped(stale)", None)
    assert rows["sharded-c1"]["status"] == "completed"
    assert rows["sharded-c1"]["images"] == []


def test_an_open_session_has_no_figures_of_an_end(recorded: Path) -> None:
    row = exported(recorded)["open-c0"]
    assert [row[name] for name in ("status", "fate", "final_reward", "reward_parts")] == [None] * 4
    assert row["prompt_token_ids"].tolist() == [1, 2, 3]


async def test_row_groups_are_all_written(ledger: Ledger, path: Path, tmp_path: Path, make) -> None:
    big = make.completion("big-c0", num_tokens=MAX_BATCH_TOKENS)
    await ledger.own.open_session(make.session("big"))
    await ledger.own.append_turn("big", make.turn("big", completions=(big,)))
    await make.closed(ledger.own, "small")
    with closing(LedgerFiles(path)) as files, files.snapshot() as snapshot:
        assert write_parquet(tmp_path / "out.parquet", completions(snapshot, NO_TOKENIZER)) == 3
    written = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [written.row_group(number).num_rows for number in range(written.num_row_groups)] == [1, 2]


def test_a_file_that_is_there_is_kept_unless_forced(recorded: Path) -> None:
    target = recorded.with_name("out.parquet")
    target.write_text("precious")
    command = ["export", str(recorded), "--parquet", str(target)]
    with pytest.raises(ConfigError, match="exists; name another file, or replace it with --force"):
        main(command)
    assert target.read_text() == "precious"
    assert main([*command, "--force"]) == 0
    assert pq.read_table(target).num_rows == 17


def test_a_failure_leaves_nothing_behind(recorded: Path, tmp_path: Path) -> None:
    def failing():
        yield exported(recorded)["open-c0"]
        raise RuntimeError("the disk is full")

    (tmp_path / "out").mkdir()
    with pytest.raises(RuntimeError, match="the disk is full"):
        write_parquet(tmp_path / "out" / "out.parquet", failing())
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "export needs a file to write: --parquet FILE"),
        (["--parquet", "."], "must be a file in an existing folder"),
        (["--parquet", "out.parquet", "--images", __file__], "is a file; name a folder"),
        (["--parquet", "missing/out.parquet"], "must be a file in an existing folder"),
    ],
)
def test_what_cannot_be_written_is_refused(recorded: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["export", str(recorded), *arguments])
