"""Saving and resuming, seen from outside a run with real processes (slow).

1. Agents are answered while a save goes on. 2. A second SIGTERM later ends everything at once: no process is left, and
the ledger is in order (test_quickstart.py has the first signal). 3. A run resumes, and again: steps after the
checkpoint are trained again. 4. A refused resume leaves the run's config as it was; a model with another tokenizer is
refused. 5. An evaluation beside training that died with its process is made up for after the resume, under the weights
with which the run goes on. 6. An asynchronous save that fails is told and counted and costs no step; the next one is
committed in the ledger once it is published.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_agent.config import Config
from areal_agent.errors import ConfigError, TrainerError
from areal_agent.ledger import questions
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import evaluation_rows, read_metrics
from areal_agent.run import Run
from areal_agent.trainer.checkpoint import latest_checkpoint
from tests.commands import run, started
from tests.run.test_run import config, end, proved_rows, solve, train

pytestmark = pytest.mark.slow


async def test_agents_are_answered_while_a_save_goes_on(tmp_path: Path, small_model: Path) -> None:
    answered: asyncio.Queue[None] = asyncio.Queue()

    async def telling(task, rollout) -> float:
        reward = await solve(task, rollout)
        answered.put_nowait(None)
        return reward

    async with Run(config(tmp_path, small_model, max_staleness=50), workflow=telling) as run:
        await train(run, 1)
        os.kill(run._gang.processes[0].pid, signal.SIGSTOP)  # a save that takes as long as the test wants
        saving = asyncio.create_task(run.save())
        await asyncio.sleep(0)
        for _ in range(answered.qsize() + 8):
            await answered.get()
        assert not saving.done()
        os.kill(run._gang.processes[0].pid, signal.SIGCONT)
        assert (await saving).name == "step_000001"
        await end(run)


async def test_a_save_that_fails_costs_no_step(tmp_path: Path, small_model: Path) -> None:
    settings = config(tmp_path, small_model, trainer={"learning_rate": 1e-3, "async_save": True})
    async with Run(settings, workflow=solve) as run:
        folder = run.folder.checkpoints
        away = folder.rename(folder.with_name("away"))
        folder.touch()  # as if the disk were gone
        await train(run, 1)
        await run.save()
        with pytest.raises(TrainerError, match=f"1 saves in a row could not be written to {folder}"):
            await run.saved()
        await train(run, 2)
        folder.unlink()
        away.rename(folder)
        await run.save()
        await train(run, 3)
        assert await run.saved() == folder / "step_000002"
        assert await run.ledger.ask(questions.last_checkpoint) == 2
        await end(run)
        assert run.checkpoint == folder / "step_000003"
    assert [row["checkpoints/failed"] for row in proved_rows(run.folder.path)] == [0, 1, 0]


@contextmanager
def running(tmp_path: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    """The main job; it has trained two steps."""
    settings = config(tmp_path, model, steps=1000).model_copy(update={"workflow": "tests.run.test_run:solve"})
    file = tmp_path / "config.yaml"
    file.write_text(settings.to_yaml())
    with started("areal_agent.train", "--config", str(file), "observe.progress=plain") as process:
        read_until(process, "2/1000")
        yield process


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"the run ended before it said {text!r}:\n{''.join(lines)}")


def test_a_second_sigterm_ends_all_at_once(tmp_path: Path, small_model: Path) -> None:
    with running(tmp_path, small_model) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        trainer = next(child for child in children if "areal_agent.trainer" in child.cmdline())
        trainer.suspend()  # no save ends
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        trainer.resume()
    assert process.returncode == 130
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert verify(tmp_path / "run" / "ledger.sqlite").violations == ()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> tuple[Config, Path]:
    """A run that was resumed twice, and its folder."""
    settings = config(tmp_path_factory.mktemp("saved"), small_model, steps=9)
    return settings, asyncio.run(again_and_again(settings))


async def again_and_again(settings: Config) -> Path:
    async with Run(settings, workflow=solve) as run:
        await train(run, 2)
        await run.save()
        await train(run, 3)  # step 3 is in no checkpoint when the run is left
    async with Run(settings, workflow=solve, resume=str(run.folder.path)) as resumed:
        assert (resumed.step, resumed.version.incarnation, resumed.version.step) == (2, 1, 2)
        await train(resumed, 3)
        await resumed.stop_producing()
        await resumed.save()
        await resumed.settle(is_completed=False)
    async with Run(settings, workflow=solve, resume=str(run.folder.path)) as again:
        assert (again.step, again.version.incarnation, again.version.step) == (3, 2, 3)
        await train(again, 5)
        await end(again)
    assert [row["step"] for row in proved_rows(run.folder.path)] == [1, 2, 3, 3, 4, 5]
    return run.folder.path


def test_it_resumes_from_its_checkpoint_again_and_again(saved: tuple[Config, Path]) -> None:
    checkpoint = latest_checkpoint(saved[1] / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 5


async def refusal(settings: Config, folder: Path, **changes: object) -> str:
    changed = Config.parse(settings.model_dump(mode="json") | changes)
    with pytest.raises(ConfigError) as caught:
        async with Run(changed, workflow=solve, resume=str(folder)):
            pass
    return str(caught.value)


async def test_a_refused_resume_leaves_the_config_as_it_was(saved: tuple[Config, Path]) -> None:
    settings, folder = saved
    before = (folder / "config.yaml").read_text()
    assert "was saved without a critic" in await refusal(settings, folder, algorithm={"preset": "ppo"})
    assert (folder / "config.yaml").read_text() == before


async def test_a_model_with_another_tokenizer_is_refused(
    saved: tuple[Config, Path], small_model: Path, tmp_path: Path
) -> None:
    settings, folder = saved
    other = shutil.copytree(small_model, tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    reason = await refusal(settings, folder, model=str(other))
    assert "is not the one that the checkpoint" in reason
    assert "step_000005" in reason


HELD_BY = "HELD_BY_METRICS"
"""Names the run's metrics.jsonl: evaluations after the first one never end."""


def is_held() -> bool:
    return HELD_BY in os.environ and "before" in Path(os.environ[HELD_BY]).read_text()


async def solve_while_free(task: Any, rollout: Any) -> float:
    if rollout.is_eval and is_held():
        await asyncio.Event().wait()
    return await solve(task, rollout)


def test_an_evaluation_that_died_is_made_up_for(tmp_path: Path, small_model: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "config.yaml"
    settings = config(
        tmp_path,
        small_model,
        workflow=f"{__name__}:solve_while_free",
        steps=3,
        rollout={"max_concurrent": 16, "max_tokens": 8},
        trainer={"checkpoint_every": 1},
        eval={"num_tasks": 2, "tasks": str(tmp_path / "tasks.jsonl"), "every": 1},
    )
    file.write_text(settings.to_yaml())
    command = ("areal_agent.train", "--config", str(file), "observe.progress=plain")
    with started(*command, **{HELD_BY: str(folder / "metrics.jsonl")}) as process:
        read_until(process, "2/3")  # by then the evaluation of step 1 has begun, and that step is saved
        children = psutil.Process(process.pid).children(recursive=True)
    assert not psutil.wait_procs(children, timeout=60)[1]  # none publishes a checkpoint any more
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    assert [row["label"] for row in evaluation_rows(read_metrics(folder / "metrics.jsonl"))] == ["before"]
    done = run("areal_agent.train", "--resume", str(folder), f"steps={checkpoint.step + 1}", "observe.progress=none")
    assert done.returncode == 0, done.stderr
    rows = evaluation_rows(read_metrics(folder / "metrics.jsonl"))
    labels = [(row["label"], row["incarnation"]) for row in rows]
    assert labels == [("before", 0), (f"step{checkpoint.step}", 1), ("after", 1)]
    assert verify(folder / "ledger.sqlite").violations == ()
