"""A run with real processes, and its train steps made again from its ledger.

1. It trains asynchronously within the staleness bound, with spans over versions, and the ledger proves it. 2. Every
step comes out bit for bit, also of a run that was left and resumed with another learning rate, and its last checkpoint
is the run's file; a replay may begin and end anywhere, and leaves the run as it is. 3. What was changed in a ledger is
named. 4. Other settings are compared step by step; what would need other rollouts is refused. 5. So do runs of other
kinds, of several ranks too (slow; of adapters in trainer/test_whole_runs.py). 6. What a ledger lacks is told.
"""

import asyncio
import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from areal_agent.errors import ConfigError, LedgerError
from areal_agent.ledger.__main__ import main
from areal_agent.run import Run
from tests.ledger.test_versions import restore
from tests.run.test_run import a_server, config, end, proved_rows, solve, train

NUM_STEPS = 4


async def run_and_resume(folder: Path, model: Path) -> Path:
    """Leave a run after a step that is in no checkpoint, and resume it with another learning rate."""
    settings = config(folder, model)
    async with Run(settings, workflow=solve) as run:
        await train(run, 2)
        await run.save()
        await train(run, 3)
    trainer = settings.trainer.model_copy(update={"learning_rate": 5e-4})
    async with Run(
        settings.model_copy(update={"trainer": trainer}), workflow=solve, resume=str(run.folder.path)
    ) as run:
        await train(run, NUM_STEPS)
        await end(run)
    return run.folder.path


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    return asyncio.run(run_and_resume(tmp_path_factory.mktemp("resumed"), small_model))


@pytest.fixture
def copied(resumed: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to change."""
    return shutil.copytree(resumed, tmp_path / "run")


def change(run: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        assert connection.execute(statement, values).rowcount


def content(run: Path) -> dict[Path, bytes]:
    """Return the files of a run, without the empty log that SQLite leaves for a reader."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "sqlite-" not in path.name}


def weights(folder: Path) -> bytes:
    return (folder / f"step_{NUM_STEPS:06d}" / "model.safetensors").read_bytes()


def test_it_trains_within_the_bound_and_the_ledger_proves_it(resumed: Path) -> None:
    rows = proved_rows(resumed)
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]  # step 3 was in no checkpoint
    assert max(row["staleness/max"] for row in rows) <= 2
    assert sum(row["rollouts/spanning"] for row in rows) > 0
    assert [row["rollouts/trained"] for row in rows[:3]] == [8, 8, 8]
    assert all(0 < row["rollouts/trained"] <= 8 for row in rows[3:])  # without those that the end cut off
    assert rows[0]["trainer/logp_diff_fresh_max"] < 1e-4


def test_a_resumed_run_comes_out_bit_for_bit(resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(resumed)
    assert main(["replay", str(resumed), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("as in the run") == NUM_STEPS
    assert weights(tmp_path / "out") == weights(resumed / "checkpoints")
    assert content(resumed) == before


def test_it_begins_and_ends_where_it_is_told(resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = resumed / "checkpoints" / "step_000002"
    assert main(["replay", str(resumed), "--from", str(checkpoint), "--to", "3"]) == 0
    told = capsys.readouterr().out
    assert "steps 3 to 3" in told and "OK: 1 steps" in told


CHANGES = {
    "reward": ("UPDATE endings SET final_reward = final_reward + 0.25", "rewards of session"),
    "token": ("UPDATE completions SET token_ids = zeroblob(length(token_ids))", "given other values for: .*token_ids"),
    "order": (
        "UPDATE steps SET sessions = (SELECT json_group_array(value) FROM "
        "(SELECT value FROM json_each(sessions) ORDER BY key DESC))",
        "in another order",
    ),
    "library": ("UPDATE incarnations SET trainer = json_set(trainer, '$.numerics.torch', '1.0')", "torch: 1.0 in the"),
    "config": (
        "UPDATE incarnations SET trainer = json_set(trainer, '$.setup.trainer.learning_rate', 0.1, "
        "'$.config.trainer.learning_rate', 0.1)",
        "the recorded config is not that of config.yaml: trainer.learning_rate 0.1 instead of 0.0005",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_ledger_is_told_by_what_was_changed(
    what: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statement, told = CHANGES[what]
    change(copied, statement)
    if what == "library":
        change(copied, "UPDATE steps SET weights = 'other' WHERE step = 3")
    checkpoint = copied / "checkpoints" / "step_000002"
    assert main(["replay", str(copied), "--from", str(checkpoint)]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT: step 3" in shown
    assert re.search(told, shown), shown


def test_weights_that_the_run_did_not_have_are_told(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copied, "UPDATE steps SET weights = 'other' WHERE step = 2")
    assert main(["replay", str(copied), "--from", str(copied / "checkpoints" / "step_000002")]) == 1
    assert "are not those that the run had after step 2" in capsys.readouterr().out


def test_other_settings_are_compared(resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    same, faster = ["--with", "trainer.checkpoint_every=7"], ["--with", "algorithm=gspo", "trainer.learning_rate=0.01"]
    assert main(["replay", str(resumed), "--to", "3", *same, *faster, "--out", str(out)]) == 0
    sides: dict[str, list[dict[str, Any]]] = json.loads((out / "comparison.json").read_bytes())["sides"]
    own, equal, other = sides.values()
    assert own == equal
    assert [one["divergence"] for one in own] == [0.0, 0.0, None]
    assert all(theirs["divergence"] > 1e-4 for theirs in other[:2])
    assert (out / "comparison.png").stat().st_size > 10_000
    assert "algorithm=gspo trainer.learning_rate=0.01" in capsys.readouterr().out


REFUSALS = {
    "--with rollout.max_tokens=3 --out OUT": "rollout.max_tokens 48 instead of 3: the rollouts are those of the run",
    "--with algorithm=gspoo --out OUT": "--with: override 'algorithm=gspoo'",
    "--with algorithm=gspo": "--with needs a folder",
    "--to 9": "--to is 9, and the ledger says how steps 1 to 4 were made",
    "--from RUN": "is not a checkpoint of a run",
    "--from RUN/checkpoints/step_000004": "no step from 1 to 4 follows",
    "--out RUN": "exists; name a folder that does not exist yet",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_be_done_is_refused(words: str, resumed: Path, tmp_path: Path) -> None:
    filled = words.replace("RUN", str(resumed)).replace("OUT", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=REFUSALS[words]):
        main(["replay", str(resumed), *filled.split()])
    assert not (tmp_path / "out").exists()


def test_what_a_ledger_lacks_is_told(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"does not say how any step was made: .* ledgers of version 3 or older"):
        main(["replay", str(restore(3, tmp_path))])
    change(copied, "DELETE FROM steps WHERE step = 1")
    with pytest.raises(ConfigError, match="begin with the checkpoint of step 1"):
        main(["replay", str(copied)])
    change(copied, "UPDATE incarnations SET trainer = json_set(trainer, '$.config.speed', 3)")
    with pytest.raises(LedgerError, match=r"process 0 of the run cannot be used: config\.speed"):
        main(["replay", str(copied)])


def test_a_model_that_is_gone_is_told(copied: Path) -> None:
    change(copied, "UPDATE incarnations SET trainer = json_set(trainer, '$.setup.model', '/nowhere')")
    with pytest.raises(ConfigError, match=r"no longer in '/nowhere'; bring it back, or begin with a checkpoint"):
        main(["replay", str(copied)])


KINDS: dict[str, dict[str, Any]] = {
    "critic, reference, minibatches": {
        "algorithm": {"preset": "ppo", "reference": "initial", "kl_coefficient": 0.05, "minibatches": 2}
    },
    "bfloat16, padded rows": {"trainer": {"dtype": "bfloat16", "packing": "padded", "learning_rate": 1e-3}},
    "stale tokens masked, two ranks": {"straggler": "mask", "max_staleness": 1, "trainer": {"num_ranks": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_other_kinds_come_out_bit_for_bit(
    kind: str, tmp_path: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with Run(config(tmp_path, small_model, **KINDS[kind]), workflow=solve) as run:
            await train(run, 3)
            await end(run)

    asyncio.run(run())
    assert main(["replay", str(tmp_path / "run")]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.count("as in the run") == 3


@pytest.mark.slow
async def test_a_run_with_a_teacher_elsewhere_comes_out_without_it(tmp_path: Path, small_model: Path) -> None:
    async with a_server(small_model) as server:
        teacher = {"url": server.base_url, "reward_weight": 1.0}
        async with Run(config(tmp_path, small_model, algorithm={"teacher": teacher}), workflow=solve) as run:
            await train(run, 2)
            await end(run)
    assert await asyncio.to_thread(main, ["replay", str(tmp_path / "run")]) == 0
