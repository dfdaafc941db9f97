"""The folder of a run: 1. one that cannot be made is refused before anything is started, and nothing stays behind;
2. whether a run is completed is in its summary; 3. a run that did not start leaves its name free, and its logs; 4. a
folder with a part in a shared directory has links to it, both have to be free, and it is not resumed while that part is
away; 5. of two that claim a directory one gets it, and an earlier incarnation has lost it."""

from pathlib import Path

import pytest

from areal_agent.errors import ConfigError, TakenOver
from areal_agent.files import RunFolder, claim, newest_claim, require_claim
from areal_agent.images import ImageFolder


@pytest.mark.parametrize("run_dir", ["/proc/areal_agent_run", "/dev/null/run"])
def test_a_folder_that_cannot_be_made_is_refused(run_dir: str) -> None:
    with pytest.raises(ConfigError, match="name another folder"):
        RunFolder.choose(run_dir, "run")


def test_asking_leaves_nothing_behind(tmp_path: Path) -> None:
    RunFolder.choose(str(tmp_path / "deep" / "run"), "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep_logs", [False, True])
def test_a_run_that_did_not_start_leaves_its_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_logs: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.choose(None, "quickstart")
    folder.make()
    folder.config.touch()
    (folder.logs / "engine.log").write_text("out of memory")
    assert RunFolder.choose(None, "quickstart").path.name == "quickstart-2"
    folder.give_up(keep_logs=keep_logs)
    assert [path.name for path in tmp_path.glob("runs/*/*/*")] == ["engine.log"] * keep_logs
    assert RunFolder.choose(None, "quickstart").path == folder.path
    assert RunFolder.choose(str(folder.path), "other").path == folder.path


@pytest.mark.parametrize(
    ("summary", "is_completed"),
    [
        ('{"status": "completed"}', True),
        ('{"status": "interrupted"}', False),
        ("{", False),
        ("[]", False),
        (None, False),
    ],
)
def test_a_summary_says_whether_the_run_is_completed(tmp_path: Path, summary: str | None, is_completed: bool) -> None:
    folder = RunFolder(tmp_path)
    if summary is not None:
        folder.summary.write_text(summary)
    assert folder.is_completed is is_completed


def test_a_part_of_it_may_be_shared(tmp_path: Path) -> None:
    own, shared = tmp_path / "own" / "run", tmp_path / "shared"
    folder = RunFolder.choose(str(own), "c", shared)
    folder.make()
    folder.keep_config("seed: 1")
    (folder.checkpoints / "step_000001").mkdir()
    assert (own / "checkpoints" / "step_000001").is_dir()
    digest = ImageFolder(own / "images").keep(b"a picture")
    assert ImageFolder(shared / "run" / "images").read(digest) == b"a picture"
    assert RunFolder(own).shared == shared / "run"
    assert (shared / "run" / "config.yaml").read_text() == "seed: 1"
    with pytest.raises(ConfigError, match="of an earlier run; resume it"):
        RunFolder.choose(str(tmp_path / "other" / "run"), "c", shared)
    with pytest.raises(ConfigError, match=r"lies in cluster\.shared_dir"):
        RunFolder.choose(str(shared / "x"), "c", shared)
    with pytest.raises(ConfigError, match=f"own folder '{own}' exists on this machine"):
        RunFolder.reopen(str(shared / "run"), str(own))
    assert RunFolder.reopen(str(shared / "run"), str(tmp_path / "new")).shared == shared / "run"
    folder.ledger.touch()
    assert RunFolder.reopen(str(own)).shared == shared / "run"
    away = shared.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=f"checkpoints are in '{folder.checkpoints}', which is away"):
        RunFolder.reopen(str(own))
    away.rename(shared)
    folder.give_up(keep_logs=True)
    assert RunFolder.choose(str(own), "c", shared).path == own


def test_one_incarnation_has_a_directory(tmp_path: Path) -> None:
    assert newest_claim(tmp_path) == -1
    claim(tmp_path, 0)
    with pytest.raises(TakenOver):
        claim(tmp_path, 0)
    claim(tmp_path, 2)
    require_claim(tmp_path, 2)
    for stale in (0, 1):
        with pytest.raises(TakenOver, match="incarnation 2 of this run"):
            require_claim(tmp_path, stale)
    assert [path.name for path in tmp_path.iterdir()] == ["incarnation_000002"]
