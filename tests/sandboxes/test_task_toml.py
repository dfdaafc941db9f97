"""The reader of task folders, without any sandbox.

1. what is wrong is an error with the file, the key, the value and the remedy; 2. Harbor's defaults, and the keys of
older tasks; 3. which paths are judged; 4. variables come from the caller alone; 5. rewards are finite, from 0 to 1, or
none.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sandboxes.spec import Access
from sandboxes.tasks.harbor import HarborTask, TaskToml, filled, load_tasks, read_task_toml, rewards_of


def write_task(folder: Path, settings: str = "", **files: str) -> Path:
    texts = {"task.toml": settings, "instruction.md": "Do it.", "tests/test.sh": "", "environment/Dockerfile": "FROM x"}
    for name, text in {**texts, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def toml(folder: Path, settings: str) -> TaskToml:
    return read_task_toml(write_task(folder, settings) / "task.toml")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("x = ", "not TOML"),
        ("[environment]\nmemory_mb = -1", r"environment.memory_mb is -1: .* greater than 0"),
        ("[environment]\nmemory = 'much'", "memory is 'much'; give memory_mb"),
        ("[environment]\ngpus = 1", "environment.gpus is 1"),
        ("[environment]\nos = 'windows'", "environment.os is 'windows'"),
        ("[environment]\nmemroy_mb = 1", "environment.memroy_mb is 1, and there is no such key.* leave it out"),
        ("[[steps]]\nname = 'a'", "steps is .* not supported here; leave it out"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec is nan"),
        ("[verifier]\nenvironment_mode = 'mine'", "verifier.environment_mode is 'mine'.*'shared' or 'separate'"),
        ("[environment]\nnetwork_mode = 'allowlist'", "give allowed_hosts together with network_mode='allowlist'"),
        ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*.org']", r"network host '\*.org' is not valid"),
        ("artifacts = ['/tests/x']\n[environment]\nworkdir = '/app'", "'/tests/x' is to be judged, and cannot be"),
        ("[environment]\nworkdir = '/'", "'/' is to be judged, and cannot be.* set .environment. workdir"),
        ("[environment]\nenv = {A = '${KEY}'}", r"\$\{KEY\}' has no value; give it: .*variables="),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){told}"):
        HarborTask.load(write_task(tmp_path, settings))


@pytest.mark.parametrize(
    ("missing", "more", "told"),
    [
        ("instruction.md", {}, r"is not a task: it lacks instruction.md"),
        ("environment/Dockerfile", {}, "names no image; add environment/Dockerfile, or set .environment. docker_image"),
        (None, {"environment/docker-compose.yaml": ""}, "docker-compose.yaml asks for more than one image"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, missing: str | None, more: dict[str, str], told: str) -> None:
    write_task(tmp_path, **more)
    if missing is not None:
        (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=told):
        HarborTask.load(tmp_path)


def test_defaults_and_older_keys(tmp_path: Path) -> None:
    plain = toml(tmp_path, "")
    assert (plain.verifier.timeout_sec, plain.environment.build_timeout_sec) == (600.0, 600.0)
    old = toml(tmp_path, "version = '1.0'\n[environment]\nmemory = '2G'\nstorage = '512M'\nallow_internet = false")
    assert (old.schema_version, old.environment.memory_mb, old.environment.storage_mb) == ("1.0", 2048, 512)
    assert old.environment.network is not None and old.environment.network.access is Access.NONE


@pytest.mark.parametrize(
    ("settings", "paths"),
    [
        ("", ["/app", "/logs/artifacts"]),
        ("artifacts = ['/app/out', {source = '/srv/data'}]", ["/app", "/logs/artifacts", "/srv/data"]),
        ("artifacts = ['out']\n[verifier]\nenvironment_mode = 'separate'", ["/app/out", "/logs/artifacts"]),
        ("[verifier]\nenvironment_mode = 'separate'", ["/app", "/logs/artifacts"]),
    ],
)
def test_paths_that_are_judged(tmp_path: Path, settings: str, paths: list[str]) -> None:
    assert toml(tmp_path, settings).declared_paths("/app", tmp_path) == paths


def test_variables_do_not_come_from_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    assert filled({"A": "${KEY:-none}"}, {}, "task.toml") == {"A": "none"}
    assert filled({"A": "<${KEY}>"}, {"KEY": "given"}, "task.toml") == {"A": "<given>"}


def test_untrusted_tasks_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, mode in (("a", "shared"), ("b", "separate"), ("c", "shared")):
        write_task(tmp_path / name, f"[verifier]\nenvironment_mode = '{mode}'")
    with caplog.at_level(logging.WARNING):
        tasks = load_tasks(tmp_path)
    assert [task.is_shared for task in tasks] == [True, False, True]
    assert len(caplog.records) == 1 and caplog.messages[0].startswith("2 of 3 tasks")


@pytest.mark.parametrize(
    "told", ["nan", "inf", "1e999", "1.01", "-0.1", "", "yes", None, [1], {}, {"a": 1, "b": 0}, {"reward": True}]
)
def test_rewards_that_are_none(told: Any) -> None:
    with pytest.raises(ValueError, match=r"reward.txt holds"):
        rewards_of(told, "reward.txt")


def test_rewards() -> None:
    assert rewards_of(" 0.25\n", "x")["reward"] == 0.25
    assert rewards_of(json.loads('{"passed": 1}'), "x") == {"passed": 1.0, "reward": 1.0}
