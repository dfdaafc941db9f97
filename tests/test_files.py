"""The folder of a run: 1. one that cannot be made is refused before anything is started, and nothing stays behind;
2. whether a run is completed is in its summary; 3. a run that did not start leaves its name free, and its logs."""

from pathlib import Path

import pytest

from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder


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
