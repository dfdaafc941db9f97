"""A disk that is full, a real one: whatever writes to it says so, and where.

1. The ledger, a shard, metrics.jsonl, the config, the report and weights for engines; 2. opening a ledger there;
3. a log is incomplete, and prints nothing; 4. a whole run ends in two lines (slow).
"""

import logging
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest
import torch

from areal_agent.errors import DiskFull, LedgerError
from areal_agent.files import RunFolder
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import LedgerShard
from areal_agent.observe.metrics import MetricsLog
from areal_agent.process import start_logging
from areal_agent.run.results import Outcome, write_report
from areal_agent.weights.channels import DiskChannel
from tests.commands import started, until_step
from tests.histories import session


@pytest.fixture(params=["1m"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root, and the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space"), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def write_sessions(shard: LedgerShard) -> None:
    for number in range(1000):
        await shard.open_session(session(f"s-{number}"))


async def to_the_ledger(disk: Path) -> None:
    async with aclosing(await Ledger.open(disk / "ledger.sqlite", create=True)) as ledger:
        fill(disk)
        await write_sessions(ledger.own)


async def to_a_shard(disk: Path) -> None:
    async with aclosing(await LedgerShard.open(disk / "ledger.w0.sqlite", create=True)) as shard:
        fill(disk)
        await write_sessions(shard)


async def to_metrics(disk: Path) -> None:
    with closing(MetricsLog(disk / "metrics.jsonl")) as log:
        fill(disk)
        log.append({"step": 1})


async def to_the_config(disk: Path) -> None:
    fill(disk)
    RunFolder(disk).keep_config("seed: 0\n")


async def to_the_report(disk: Path) -> None:
    (disk / "metrics.jsonl").touch()
    fill(disk)
    write_report(RunFolder(disk), Outcome())


async def to_weights(disk: Path) -> None:
    DiskChannel(disk, torch.float32).write({"weight": torch.zeros(2**19)})


WRITERS = (to_the_ledger, to_a_shard, to_metrics, to_the_config, to_the_report, to_weights)


@pytest.mark.parametrize("write", WRITERS)
async def test_what_cannot_be_written_names_the_disk(disk: Path, write: Callable[[Path], Awaitable[None]]) -> None:
    with pytest.raises(DiskFull, match=f"^the disk of {disk} is full: .* could not be written; make room there$"):
        await write(disk)


async def test_a_ledger_cannot_be_opened_there(disk: Path) -> None:
    fill(disk)
    with pytest.raises(LedgerError, match="disk is full; make room there"):
        await Ledger.open(disk / "ledger.sqlite", create=True)


def test_a_log_prints_nothing(disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers, root.level
    fill(disk)
    start_logging(disk / "main.log")
    logging.getLogger("areal_agent").warning("something")
    root.handlers, root.level = before
    logging.captureWarnings(False)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["32m"], indirect=True)
def test_a_run_ends_in_two_lines(disk: Path) -> None:
    folder = disk / "run"
    sizes = ("batch_size=4", "group_size=4", "eval.num_tasks=4", "rollout.workers=2")
    command = ("areal_agent.train", "--config", "configs/quickstart.yaml", f"run_dir={folder}", *sizes)
    with started(*command, "steps=50") as process:
        until_step(process, folder, 1)
        fill(disk)
        out, _ = process.communicate(timeout=120)
    told, hint = out.splitlines()[-2:]
    assert (process.returncode, "Traceback" in out) == (1, False)
    assert told.startswith(f"error: the disk of {folder} is full: ")
    assert hint == f"go on with: python -m areal_agent.train --resume {folder}"
