"""Signals while `train` runs, and how a failed run ends.

- The first signal cancels the work, once; not in the closing phase. It is told that it was heard.
- Two that come at once, as `timeout` sends them to a process and its group, count as one.
- While a workflow blocks the loop, the first signal tells its place within a second, and the second ends the process.
- A report that cannot be written is added to the error as a note and does not replace it.
- A damaged ledger is found when it is opened again; after a failure, what to do then is said instead of a resume.
- Where rollouts failed, the logs are named; a resume is offered only after a step, and once the cause is mended.
- A run whose trainer dies on a cluster goes on, before its first checkpoint too, until `cluster.restarts` are used up.
"""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_agent.config import Config
from areal_agent.errors import ArealAgentError, LedgerDamaged, RolloutsFailing, TrainerDied
from areal_agent.files import RunFolder
from areal_agent.ledger.ledger import Ledger
from areal_agent.run import loop
from areal_agent.run.loop import Interruption, report_failure
from areal_agent.run.results import Outcome
from areal_agent.trainer.checkpoint import publish_checkpoint


async def signalled(
    interruption: Interruption, *, is_closing: bool = False, signals: Sequence[signal.Signals] = (signal.SIGINT,)
) -> list[str]:
    """What happened to a task that sends itself signals."""
    events: list[str] = []

    async def work() -> int:
        task = asyncio.current_task()
        assert task is not None
        with interruption.cancels(task):
            if is_closing:
                interruption.close()
            for number in signals:
                os.kill(os.getpid(), number)
            try:
                while not interruption.happened:  # noqa: ASYNC110 (a signal has no event of its own)
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                events.append("cancelled")
                task.uncancel()
        events.append("done")
        return 0

    await asyncio.create_task(work())
    return events


@pytest.mark.parametrize(
    ("is_closing", "number", "events"),
    [
        (False, signal.SIGTERM, ["cancelled", "done"]),
        (False, signal.SIGHUP, ["cancelled", "done"]),
        (True, signal.SIGUSR1, ["done"]),
    ],
)
async def test_the_first_signal(
    request: pytest.FixtureRequest, is_closing: bool, number: signal.Signals, events: list[str]
) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # not ignored, as it is under nohup
    request.addfinalizer(lambda: signal.signal(number, before))
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    interruption = Interruption(notes.put)
    assert await signalled(interruption, is_closing=is_closing, signals=[number]) == events
    assert interruption.happened
    told = await asyncio.to_thread(notes.get)
    assert told.startswith(f"interrupted ({number.name}): ending once what is under way has ended; a second signal")


async def test_two_signals_at_once_are_one() -> None:
    both = (signal.SIGTERM, signal.SIGINT)
    assert await signalled(Interruption(lambda _: None), signals=both) == ["cancelled", "done"]


BLOCKED = """
import asyncio, hashlib, time
from areal_agent.run.loop import Interruption

async def solve():
    print("blocked", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

async def main():
    with Interruption(lambda text: print(text, flush=True)).cancels(asyncio.current_task()):
        await asyncio.create_task(solve(), name="rollout s-1")

asyncio.run(main())
"""


def test_a_blocked_loop_is_named_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(BLOCKED)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "blocked\n"
        process.send_signal(signal.SIGTERM)
        told = process.stdout.readline()
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
    assert told.startswith(
        f"interrupted (SIGTERM): held up by rollout s-1 at {program}:7 in solve: hashlib.pbkdf2_hmac("
    )
    assert process.returncode == 130


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    folder.summary.mkdir()  # no file can be written there
    error = ArealAgentError("the disk is full")
    report_failure(folder, Outcome(), error, num_steps=3)
    report, hint = error.__notes__
    assert "report could not be written" in report
    assert hint == f"go on with: python -m areal_agent.train --resume {tmp_path}"


@pytest.mark.parametrize(("num_steps", "is_offered"), [(0, False), (3, True)])
def test_a_resume_is_offered_where_it_helps(tmp_path: Path, num_steps: int, is_offered: bool) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    error = RolloutsFailing("8 groups in a row failed")
    report_failure(folder, Outcome(), error, num_steps)
    logs, *hints = error.__notes__
    assert str(folder.logs) in logs
    assert [hint.startswith("go on with: once the cause is mended, ") for hint in hints] == [True] * is_offered


async def test_a_damaged_ledger_gets_no_advice_to_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    await (await Ledger.open(folder.ledger, create=True)).aclose()
    with folder.ledger.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(LedgerDamaged, match=rf"ledger.sqlite is damaged .* -m areal_agent.ledger verify {tmp_path}"):
        await Ledger.open(folder.ledger, create=False)
    checkpoint = publish_checkpoint(
        folder.checkpoints, step=4, incarnation=0, run_state={}, write=lambda _: None, keep_last=1
    )
    error = ArealAgentError("the gateway answered /rl/start_session with 500")
    report_failure(folder, Outcome(), error, num_steps=4)
    *_, damage = error.__notes__
    assert "so its run cannot be resumed" in damage and "--resume" not in damage
    assert damage.endswith(f"--config {folder.config} model={checkpoint.path} run_dir={tmp_path}-again")


class DyingRun:
    """Takes the place of a `Run`. Its trainer dies before the first step."""

    step, checkpoint = 0, None
    preflight = SimpleNamespace(eval_tasks=(), benchmarks=())

    def __init__(
        self, config: Config, *, progress: Any, resume: str = "", num_ranks: int | None = None, deaths: list[str]
    ) -> None:
        self.config, self.progress = config, progress
        self.folder = RunFolder(Path(resume or str(config.run_dir)))
        self.ledger = SimpleNamespace(ask=self._die)
        self._began = f"{'resumed' if resume else 'new'} with {num_ranks or config.trainer.num_ranks}"
        self._deaths = deaths

    async def __aenter__(self) -> "DyingRun":
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        self.folder.metrics.touch()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def _die(self, *_: object) -> None:
        self._deaths.append(self._began)
        raise TrainerDied(f"rank 1 of the trainer is lost ({self._began})")


async def test_restarts_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths, notes = list[str](), list[str]()
    values = {"model": "tiny", "workflow": "a:b", "tasks": "c:d", "run_dir": str(tmp_path / "run"), "steps": 9}
    config = Config.parse(
        {**values, "trainer": {"num_ranks": 3}, "cluster": {"kind": "ray", "address": "h:1", "restarts": 2}}
    )
    sizes = iter((2, 1))

    async def ranks_that_fit(*_: object) -> int:
        return next(sizes)

    monkeypatch.setattr(loop, "start_logging", lambda *_, **__: None)
    monkeypatch.setattr(loop, "ranks_that_fit", ranks_that_fit)
    monkeypatch.setattr(loop, "Run", partial(DyingRun, deaths=deaths))
    progress: Any = SimpleNamespace(note=notes.append, close=lambda: None)
    run: Any = DyingRun(config, progress=progress, deaths=deaths)
    with pytest.raises(TrainerDied, match="resumed with 1") as caught:
        await loop._train(run)  # pyright: ignore[reportPrivateUsage]
    assert deaths == ["new with 3", "resumed with 2", "resumed with 1"]
    assert [note for note in notes if "going on" in note] == [
        "going on from the start with 2 of 3 ranks; cluster.restarts left: 1",
        "going on from the start with 1 of 3 ranks; cluster.restarts left: 0",
    ]
    assert caught.value.__notes__ == [f"go on with: python -m areal_agent.train --resume {tmp_path / 'run'}"]
    assert json.loads(RunFolder(tmp_path / "run").summary.read_text())["status"] == "failed"
