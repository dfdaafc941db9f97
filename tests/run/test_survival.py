"""A run whose machine is lost goes on from what it shared.

1. Its folder is restored with config, metrics and ledger, and what is lost is told; 2. a folder whose run went on
elsewhere is refused, and one that died between its claim and its beginning is not; 3. a whole run without an address,
on a Ray of its own, for which no token is left: another process goes on from the shared folder, with a worker, all is
trained once, and the first, which wakes up after it, publishes nothing (slow).
"""

import json
import re
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from areal_agent.errors import TakenOver
from areal_agent.files import RunFolder, claim
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.run.sources import begin
from areal_agent.run.survival import Survival, restore
from areal_agent.types import WeightVersion
from tests.commands import run as run_command
from tests.commands import started
from tests.ledger.conftest import Make
from tests.resume.test_saving import read_until
from tests.run.test_run import config


async def begun(folder: RunFolder, ledger: Ledger) -> WeightVersion:
    return (await begin(ledger, folder.checkpoints)).version


async def test_what_a_run_shared_is_restored_and_what_is_lost_is_told(tmp_path: Path) -> None:
    lost = RunFolder(tmp_path / "lost" / "run", tmp_path / "shared" / "run")
    lost.make()
    lost.keep_config("seed: 1")
    lost.metrics.write_text("{}\n")
    make = Make()
    async with aclosing(await Ledger.open(lost.ledger, create=True)) as ledger:
        await begun(lost, ledger)
        survival = Survival(lost, ledger, 0)
        await make.closed(ledger.own, "a", "b")
        digest = ImageFolder(lost.path / IMAGES).keep(b"a picture")
        await survival.saving(2)
        await make.closed(ledger.own, "c", "d", "e")
        await survival.pushing(3)
        await make.closed(ledger.own, "f")
    folder = RunFolder.reopen(str(lost.shared), str(tmp_path / "found"))
    told = restore(folder)
    assert "snapshot of step 2: at least 3 rollouts that ended after it are lost, and 1 train steps" in told
    assert ImageFolder(folder.path / IMAGES).read(digest) == b"a picture"
    assert (folder.config.read_text(), folder.metrics.read_text()) == ("seed: 1", "{}\n")
    async with aclosing(await Ledger.open(folder.ledger, create=False)) as ledger:
        assert await begun(folder, ledger) == WeightVersion(incarnation=1)
        assert len(await ledger.ask(questions.waiting)) == 2
    async with aclosing(await Ledger.open(lost.ledger, create=False)) as ledger:
        with pytest.raises(TakenOver, match="incarnation 1 of this run"):
            await begun(lost, ledger)
        with pytest.raises(TakenOver):
            await Survival(lost, ledger, 0).pushing(4)


async def test_a_process_that_died_between_claim_and_beginning_may_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    async with aclosing(await Ledger.open(folder.ledger, create=True)) as ledger:
        await ledger.set_note(questions.CLAIM_NOTE, 0)
        claim(folder.checkpoints, 0)
        assert await begun(folder, ledger) == WeightVersion(incarnation=1)
        assert await begun(folder, ledger) == WeightVersion(incarnation=2)


@pytest.mark.slow
def test_another_machine_goes_on_and_the_first_one_publishes_nothing(tmp_path: Path, small_model: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    shared, token = tmp_path / "shared", Path.home() / ".ray" / "auth_token"
    was_there = token.exists()
    cluster = {"kind": "ray", "shared_dir": str(shared), "lost_after_s": 60}
    settings = config(tmp_path, small_model, steps=1000, cluster=cluster)
    settings = settings.model_copy(update={"workflow": "tests.run.test_run:solve"})
    file = tmp_path / "config.yaml"
    file.write_text(settings.to_yaml())
    with started("areal_agent.train", "--config", str(file), "observe.progress=plain") as first:
        read_until(first, "3/1000")
        first.send_signal(signal.SIGSTOP)  # as if its machine were cut off
        found = tmp_path / "found"
        changes = (f"run_dir={found}", "steps=5", "rollout.workers=1")
        done = run_command("areal_agent.train", "--resume", str(shared / "run"), *changes)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((found / "summary.json").read_text())
        assert summary["status"] == "completed"
        assert summary["wall_s"] > summary["seconds"]["wall"] - 1.0  # with the time of the process before
        assert token.exists() == was_there
        assert re.search(r"snapshot of step 2: at least \d+ rollouts .* lost, and 1 train steps", done.stdout)
        report = verify(found / "ledger.sqlite")
        assert report.is_ok, report
        published = written(shared / "run")
        first.send_signal(signal.SIGCONT)
        told = read_until(first, "has claimed")
        first.communicate()
    assert first.returncode == 1, told
    assert written(shared / "run") == published


def written(folder: Path) -> dict[Path, int]:
    """When the checkpoints and snapshots were written, in nanoseconds."""
    files = (path for name in ("checkpoints", "ledger") for path in (folder / name).rglob("*"))
    return {path: path.stat().st_mtime_ns for path in files}
