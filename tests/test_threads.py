"""`auto` threads: what is left of the cores for a large model, one for a small one and on a cluster; numbers stay."""

import json
from pathlib import Path

import pytest

from areal_agent import ConfigError
from areal_agent.config import Config
from areal_agent.dtype import LARGE
from areal_agent.threads import num_cores, share_out

HERE = {"tasks": "envs.calculator.tasks:load", "engine": {"device": "cpu"}, "trainer": {"device": "cpu"}}
ELSEWHERE = {"rollout": {"gateway_url": "http://127.0.0.1:1"}, "eval": {"num_tasks": 0}, "trainer": {"device": "cpu"}}


def threads(folder: Path, hidden_size: int, **values: object) -> tuple[object, object]:
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden_size}))
    config = Config.model_validate({"model": str(folder), **values}).with_threads()
    return config.engine.threads, config.trainer.threads


def test_a_run_uses_the_cores_of_this_machine_for_a_large_model(tmp_path: Path) -> None:
    assert threads(tmp_path, LARGE, **HERE) == share_out(num_cores(), "auto", 1, "auto", 1)
    alone = Config.model_validate({"model": str(tmp_path), **HERE}).with_threads(trains=False)
    assert alone.engine.threads == num_cores()
    online = ELSEWHERE | {"engine": {"url": "http://127.0.0.1:1"}}
    assert threads(tmp_path, LARGE, **online) == ("auto", num_cores())


def test_a_small_model_has_one_thread_a_process_and_numbers_stay(tmp_path: Path) -> None:
    assert threads(tmp_path, LARGE - 1, **HERE) == (1, 1)
    assert threads(tmp_path, LARGE, **HERE | {"engine": {"threads": 3, "device": "cpu"}})[0] == 3
    assert Config.model_validate(HERE | {"model": "tiny"}).with_threads().trainer.threads == 1


@pytest.mark.parametrize("given", ["0", "1025", "1.5", "true", "all"])
def test_what_is_no_number_of_threads_is_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / "c.yaml").write_text("tasks: a:b\n")
    with pytest.raises(ConfigError, match=r"threads is .*; give a (whole number from 1 to 1024, or 'auto'|number)"):
        Config.load(tmp_path / "c.yaml", [f"trainer.threads={given}"])
