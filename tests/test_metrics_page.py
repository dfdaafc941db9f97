"""docs/metrics.md and what a run writes agree: a real run with two sources, evaluation beside training and a tracker.

1. every metric of every row is explained, and everything explained without "Only" is in the rows of its kind; 2. in
every row the seconds of each side add up to the wall time; 3. an evaluation beside training names the weights of
its answers; 4. one that was given up leaves a ledger that proves itself; 5. the tracker got what the file has; 6.
rewards are told by source.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import evaluation_rows, read_metrics, step_rows
from areal_agent.run import Run
from tests.run.test_run import config

pytestmark = pytest.mark.slow  # a run of its own

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
LINE = re.compile(r"^\| `(?P<name>[^`]*/[^`]*)` \|[^|]*\| (?P<meaning>.*) \|$", re.MULTILINE)
PLACEHOLDER = re.compile(r"<\w+>")


async def solve(task: dict[str, Any], rollout: Any) -> float:
    reply = await rollout.client.chat.completions.create(model=rollout.model, messages=task["messages"])
    rollout.log(answer_chars=len(reply.choices[0].message.content or ""))
    return float(rollout.seed % 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    """A finished run of two steps."""
    tmp_path = tmp_path_factory.mktemp("metrics")
    for name in ("sums", "products"):
        lines = [{"id": str(n), "messages": [{"role": "user", "content": f"{name} {n}?"}]} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = config(
        tmp_path,
        small_model,
        tasks={"source": str(tmp_path / "sums.jsonl"), "mix": [str(tmp_path / "products.jsonl")]},
        steps=2,
        max_staleness=1,
        rollout={"max_concurrent": 8, "max_tokens": 16},
        eval={"num_tasks": 4, "tasks": str(tmp_path / "sums.jsonl"), "every": 1},
        observe={"trackers": ["tensorboard"]},
    )
    asyncio.run(train(Run(settings, workflow=solve)))
    return tmp_path / "run"


async def step(run: Run) -> None:
    await run.train_step(await run.prepare_batch())
    await run.push()


async def train(run: Run) -> None:
    async with run:
        await step(run)
        run.evaluate_beside()
        await step(run)
        await run.evaluation.finish()
        run.evaluate_beside()  # it is given up below, at whatever it is doing then
        await run.stop_producing()
        await run.evaluation.cancel()
        await run.save()
        await run.settle(is_completed=True)


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def test_every_metric_is_explained_and_every_explanation_is_of_one(rows: list[dict[str, Any]]) -> None:
    explained = {one["name"]: one["meaning"] for one in LINE.finditer(PAGE.read_text())}
    written = {name for row in rows for name in row if "/" in name}
    patterns = [re.compile(".+".join(map(re.escape, PLACEHOLDER.split(name)))) for name in explained]
    assert {name for name in written if not any(pattern.fullmatch(name) for pattern in patterns)} == set()
    for kind, of_kind in (("eval/", evaluation_rows(rows)), ("", step_rows(rows))):
        always = {
            name
            for name, meaning in explained.items()
            if not meaning.startswith("Only") and name.startswith("eval/") == bool(kind)
        }
        assert of_kind
        assert [always - set(row) for row in of_kind] == [set()] * len(of_kind)


def test_the_seconds_of_each_side_add_up(rows: list[dict[str, Any]]) -> None:
    timed = [row for row in rows if "seconds/wall" in row]
    assert [row["kind"] for row in timed] == ["time", "step", "step", "time"]
    for row in timed:
        for side in ("engine", "trainer"):
            seconds = [value for name, value in row.items() if name.startswith(f"seconds/{side}/")]
            assert sum(seconds) == pytest.approx(row["seconds/wall"])
            assert min(seconds) >= 0.0


def test_evaluations_name_the_weights_of_their_answers(rows: list[dict[str, Any]]) -> None:
    for row in evaluation_rows(rows):
        by_step = {int(name.rpartition("/")[2]): n for name, n in row.items() if name.startswith("eval/answers_at/")}
        assert sum(by_step.values()) == row["eval/num_tasks"] == 4
        assert min(by_step) >= row["step"]


def test_the_ledger_proves_it_with_an_evaluation_that_was_given_up(folder: Path, rows: list[dict[str, Any]]) -> None:
    assert [row["label"] for row in evaluation_rows(rows)] == ["step1"]
    assert verify(folder / "ledger.sqlite").is_ok


def test_the_tracker_got_what_the_file_has(folder: Path, rows: list[dict[str, Any]]) -> None:
    (path,) = (folder / "tensorboard").iterdir()
    content = path.read_bytes()
    assert all(name.encode() in content for row in step_rows(rows) for name in row if "/" in name)


def test_rewards_are_told_by_source(rows: list[dict[str, Any]]) -> None:
    names = {name for row in step_rows(rows) for name in row if name.startswith("reward/mean/")}
    assert names == {"reward/mean/sums", "reward/mean/products"}
