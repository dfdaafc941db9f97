"""`python -m areal_agent.view` shows what a run recorded, and changes nothing.

1. groups are listed with their siblings, rewards and fates, trained ones first, and can be chosen; 2. a session is
shown as a conversation, also if its group has its name: text, reasoning, calls, results, branches with their reasons,
versions, what is in the loss and why the rest is not; 3. hostile text reaches a terminal as escapes, and cannot pass
for a heading; 4. only a terminal gets colours, and NO_COLOR is heeded; 5. a run that goes on is shown as far as it is,
and no file changes; 6. a name that does not exist gets near ones; what is no readable ledger gets one line; 7. without
a tokenizer the tokens are counted; 8. an export has the text of answers and whole conversations; 9. damaged metrics
hide no rollouts; 10. an image is a line about it; 11. of a model that sees, what reads a run imports no torch.
"""

import asyncio
import io
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, closing, redirect_stdout
from functools import partial
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from areal_agent.command import run_command
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger.__main__ import main as ledger_command
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import SessionPurpose
from areal_agent.view.__main__ import main
from areal_agent.view.terminal import visible
from tests import histories
from tests.histories import open_ledger
from tests.view.recorder import QUESTION, Recorder, look, talk
from tests.vision import make_vision_model


@pytest.fixture
def show(run: Path, capsys: pytest.CaptureFixture[str]):
    def shown(*arguments: str) -> str:
        assert main([str(run), *(arguments if "--text" in arguments else ("--list", *arguments))]) == 0
        return capsys.readouterr().out

    return shown


def test_groups_are_listed_with_siblings_rewards_and_fates(show) -> None:
    lines = show().splitlines()
    assert (
        "rollouts: 1 trained, 4 dropped (1 error, 2 orphan, 1 stale); 0 leased, 0 waiting, 1 open; 1 for evaluation"
        in lines
    )
    heads = [line.split()[0] for line in lines if "rollouts," in line and line[0] != "r"]
    assert heads == ["g0", "cut", "g2", "g1"]
    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.startswith("  ")}
    assert rows["g0-0"] == ["0.75", "trained(1)"]
    assert rows["g0-1"] == ["0", "dropped(stale)"]
    assert rows["g1-0"][1] == "dropped(error)"
    assert rows["g2-0"][0] == "open"
    assert any(line.endswith("KeyError: 'x' (a.py:3)") for line in lines)
    assert "  2 cancelled: the run ended first" in lines


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        (["--step", "1"], ["g0"]),
        (["--failed"], ["cut", "g1"]),
        (["--lowest"], ["g0"]),
        (["--eval"], ["e"]),
        (["--limit", "1"], ["g0"]),
        (["--step", "7"], []),
        (["--text", "g1"], ["g1"]),
    ],
)
def test_groups_are_chosen(show, options: list[str], groups: list[str]) -> None:
    shown = [line.split()[0] for line in show(*options).splitlines() if " rollouts, " in line and "task" in line]
    assert shown == groups


@pytest.mark.parametrize(
    ("options", "session"), [([], "g0-0"), (["--step", "1"], "g0-0"), (["--eval"], "e-0"), (["--failed"], "cut-0")]
)
def test_text_without_a_name_is_the_newest_trained_conversation(show, options: list[str], session: str) -> None:
    assert show("--text", *options).startswith(f"{session}  group ")


def test_a_session_is_a_conversation(show) -> None:
    text = show("--text", "g0-0")
    for line in (
        "completed, reward 0.75  trained(1)",
        "by answer: t2-c 0.25",
        "parts, not in the reward: format 1",
        'logged: {"tries":2}',
        "siblings:  g0-0 0.75  g0-1 0",
        "user       │ What is 2 + 2?",
        "answer     │ Let me see.",
        "call       │ python",
        "  code     │ a = 2",
        "           │ print(a + 2)",
        "tool       │ 4",
        "turn 3  branch: edited; it keeps 7 tokens up to turn 1",
        "turn 4  branch: new_conversation",
        "its first 1 messages are those of turn 1",
        "user       │ Really?",
    ):
        assert line in text.splitlines(), line
    assert "\n4 turns in 3 chains (1 edited, 1 new_conversation), " in text
    assert text.count("What is 2 + 2?") == 1
    facts = [line for line in text.splitlines() if " └ " in line]
    assert [line.rpartition("; ")[2] for line in facts] == ["in the loss", "reward 0.25", "in the loss", "in the loss"]
    assert "not in the loss: altered" in facts[1]
    assert "1 by 0:1" in facts[0]


async def test_a_session_may_have_its_groups_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_ledger(tmp_path) as ledger:
        for name in ("alone", "other"):
            await ledger.own.open_session(histories.session(name, group_id="alone"))
    assert main([str(tmp_path), "--text", "alone"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("alone  group alone")
    assert "siblings:  alone" in text and "other" in text


def test_what_was_left_out_of_the_loss_is_counted(show) -> None:
    assert "in the loss of step 1: 30 tokens; " in show("--text", "g0-0")
    assert "not in the loss: dropped(stale)" in show("--text", "g0-1")
    assert "not in the loss: for evaluation" in show("--text", "e-0")


def test_hostile_text_reaches_no_terminal(show) -> None:
    for text in (show(), show("--text", "g2-0")):
        assert not set(text) & set("\x1b\x07\x9b\u202e\u2066\r\x08\u200b")
        assert "\\x1b]0;owned\\x07" in text
    lines = show("--text", "g2-0").splitlines()
    assert "           │ turn 9" in lines and "turn 9" not in lines
    assert visible("שלום \u200d é\t") == "שלום \u200d é\t"


def test_long_texts_are_cut_unless_all_is_asked_for(show, run: Path) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        big = orjson.dumps([{"role": "user", "content": "a" * 3000 + "b" * 3000}]).decode()
        connection.execute("UPDATE turns SET request_delta = ? WHERE id = 'e-0-1'", (big,))
    text = show("--text", "e-0")
    assert "[2,000 characters are left out: --full shows them]" in text
    assert text.count("a" * 2000) == 1 and "b" * 3000 not in text
    assert "a" * 3000 + "b" * 3000 in show("--text", "e-0", "--full")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def in_terminal(run: Path) -> str:
    with redirect_stdout(Terminal()) as written:
        assert main([str(run), "--text", "g0-0"]) == 0
    return written.getvalue()


def test_a_terminal_gets_colours_unless_it_wants_none(run: Path, show, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in in_terminal(run)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in in_terminal(run).replace("\x1b[3m", "")  # italics are no colour
    assert "\x1b" not in show("--text", "g0-0")


@pytest.mark.parametrize(
    ("evaluates", "options", "said"),
    [
        (False, (), "nothing is recorded here; the rollouts of an online run are in the ledger of its gateway"),
        (True, (), "all rollouts here are of evaluations: --eval shows them"),
        (True, ("--step", "3"), "no group fits; without options the newest are shown"),
        (True, ("--eval",), "1 of 1 groups"),
    ],
)
async def test_where_no_group_is_shown_it_says_where_some_are(
    tmp_path: Path,
    small_model: Path,
    capsys: pytest.CaptureFixture[str],
    evaluates: bool,
    options: tuple[str, ...],
    said: str,
) -> None:
    async with aclosing(await Ledger.open(tmp_path / "ledger.sqlite", create=True)) as ledger:
        await ledger.begin_incarnation(0)
        recorder = Recorder(ledger, small_model)
        if evaluates:
            turn = recorder.turn("e-1", "user", "What is 1?", "1")
            await recorder.session("e", turn, group_id="eval", purpose=SessionPurpose.EVAL)
    assert main([str(tmp_path), "--list", *options]) == 0
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_a_damaged_row_of_metrics_hides_no_rollouts(run: Path, show) -> None:
    (run / "metrics.jsonl").write_text("{\n")
    assert "g0-0" in show()


def test_reading_changes_nothing(run: Path, show) -> None:
    before = (run / "ledger.sqlite").read_bytes(), (run / "ledger.sqlite-wal").read_bytes()
    show()
    show("--text", "g0-0")
    assert ((run / "ledger.sqlite").read_bytes(), (run / "ledger.sqlite-wal").read_bytes()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--failed",), "are for --list or --text; add one"),
        (("--list", "--port", "1"), "--port and several runs are for the page"),
        (("--port", "70000"), "--port is 70000; give one from 1 to 65535"),
        (("--list", "--limit", "0"), "--limit is 0; give at least 1"),
    ],
)
def test_an_option_without_effect_is_refused(run: Path, capsys, options: tuple[str, ...], message: str) -> None:
    code, error = refused(run, *options, capsys=capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert message in error


def test_an_unknown_name_gets_near_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(run, "--text", "g00-1", capsys=capsys) == (
        2,
        "error: the ledger has no session or group 'g00-1'; did you mean g0-1, g0-0?\n",
    )


def refused(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: main(list(map(str, arguments))))
    return int(str(ended.value.code)), capsys.readouterr().err


def damage(folder: Path, name: str) -> Iterator[None]:
    """Make something of that kind of a folder; go on where the folder is to be read."""
    file = folder / "ledger.sqlite"
    match name:
        case "no ledger":
            file.unlink()
        case "no database":
            file.write_bytes(b"not a database at all" * 100)
        case "torn":
            file.write_bytes(file.read_bytes()[: 3 * 4096])
        case "newer":
            with closing(sqlite3.connect(file)) as connection:
                connection.execute("PRAGMA user_version = 99")
        case "locked":
            with closing(sqlite3.connect(file)) as connection:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("BEGIN EXCLUSIVE")
                yield
                return
    yield


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("no ledger", 2, "has no ledger.sqlite, so it is not a run folder"),
        ("no database", 1, "file is not a database; restore it from a copy"),
        ("torn", 1, "malformed; restore it from a copy"),
        ("newer", 1, "by a newer areal_agent"),
        ("locked", 1, "database is locked; another program holds it; wait until that has ended"),
    ],
)
async def test_what_cannot_be_read_gets_one_line(
    tmp_path: Path,
    small_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.1))  # 5 s for a lock
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    await talk(Recorder(ledger, small_model))
    await ledger.aclose()
    for _ in damage(tmp_path, kind):
        for options in ([], ["--list"])[kind == "locked" :]:  # the page, and the terminal; a lock is waited for
            got, error = refused(tmp_path, *options, capsys=capsys)
            assert (got, error.count("\n")) == (code, 1)
            assert message in error
    assert "there is no run folder" in refused(tmp_path / "elsewhere", capsys=capsys)[1]


async def test_without_a_tokenizer_tokens_are_counted(
    tmp_path: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    await talk(Recorder(ledger, small_model))
    await ledger.aclose()
    main([str(tmp_path), "--text", "g0-1"])
    assert "tokens; --tokenizer FOLDER shows their text" in capsys.readouterr().out
    main([str(tmp_path), "--text", "g0-1", "--tokenizer", str(small_model)])
    assert "answer     │ 5" in capsys.readouterr().out
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_000001").symlink_to(small_model)
    main([str(tmp_path), "--text", "g0-1"])
    assert "answer     │ 5" in capsys.readouterr().out


def test_an_export_has_texts_and_whole_conversations(run: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "out.parquet"
    assert ledger_command(["export", str(run), "--parquet", str(target)]) == 0
    assert capsys.readouterr().err == ""
    row = next(row for row in pq.read_table(target).to_pylist() if row["completion_id"] == "t2-c")
    assert row["text"] == "<think>\nIt is 4.\n</think>\n\nThe answer is 4.<|im_end|>"
    question, answer, result = orjson.loads(row["messages"])
    assert (question, result) == (QUESTION, {"role": "tool", "content": "4"})
    assert (answer["role"], answer["content"]) == ("assistant", "Let me see.")
    assert orjson.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"code": "a = 2\nprint(a + 2)"}


async def test_an_image_is_a_line_about_it(tmp_path: Path, small_model: Path, capsys: pytest.CaptureFixture) -> None:
    digest = await look(tmp_path, small_model)
    assert main([str(tmp_path), "--text", "look"]) == 0
    assert "tool       │ Done\n           │ [image PNG 56x56, 4 tokens]\n" in capsys.readouterr().out
    ImageFolder(tmp_path / IMAGES).file(digest).unlink()
    assert main([str(tmp_path), "--text", "look"]) == 0
    assert f"[image {digest[:12]}, which cannot be read, 4 tokens]\n" in capsys.readouterr().out


READERS = """
import sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast  # older ones load torch themselves
run, model, given = sys.argv[1], sys.argv[2], set(sys.modules)
import areal_agent.run.loop, areal_agent.doctor.examination
from areal_agent.ledger.__main__ import main as ledger
from areal_agent.tokens.renderer import Renderer
from areal_agent.view.__main__ import main as view
assert view([run, "--text", "look"]) == ledger(["export", run, "--parquet", run + "/out.parquet"]) == 0
renderer = Renderer.load(Path(model))
print({"torch"} & (set(sys.modules) - given), renderer.vision() is not None, "torch" in sys.modules)
"""
"""`view`, `export`, and what a main process does with its renderer, before its gateway asks what the model sees."""


def test_what_reads_a_run_of_a_model_that_sees_imports_no_torch(tmp_path: Path) -> None:
    asyncio.run(look(tmp_path / "run", make_vision_model(tmp_path)))
    command = [sys.executable, "-c", READERS, str(tmp_path / "run"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("\nset() True True\n"), done.stdout + done.stderr
