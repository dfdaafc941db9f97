"""Benchmarks of a run's evaluations.

1. The keys of a file of one's own go over the run's, those of an entry over both; seeds and sessions are those of the
held-out tasks. 2. What cannot be evaluated is refused before the run starts, where it is given. 3. A report has the
figures of each, and without held-out tasks no others. 4. A run, with workers and without, evaluates them by their own
workflow and settings, remembers over a restart what they were before training, and its ledger names them (slow).
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import evaluation_rows, read_metrics
from areal_agent.run.benchmarks import load_benchmarks
from areal_agent.run.preflight import Preflight
from areal_agent.run.serving import EvalAnswer, EvalReport, eval_specs
from tests.commands import run

KEYS = {
    "workflow": f"{__name__}:play",
    "samples": 8,
    "eval": {"num_tasks": 3, "tasks": f"{__name__}:load"},
    "rollout": {"max_tokens": 5, "timeout_s": 7},
    "sandbox": {"wall_s": 2},
    "engine": {"max_context_tokens": 1024},
}


def load(split: str, seed: int) -> list[dict[str, Any]]:
    return [{"id": f"{split}-{n}", "messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(4)]


async def play(task: dict[str, Any], rollout: Any) -> float:
    """Return 1.0 in the sandbox of the benchmark, and 0.0 in that of the run."""
    await rollout.client.chat.completions.create(model=rollout.model, messages=task["messages"])
    return float(rollout.sandbox["wall_s"] == KEYS["sandbox"]["wall_s"])


def config_of(tmp_path: Path, entry: object, keys: dict[str, Any], **values: Any) -> Config:
    """The config of a run with an entry, where `FILE` stands for a file with these keys."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(keys))
    given: dict[str, Any] = {
        "workflow": f"{__name__}:play",
        "tasks": f"{__name__}:load",
        "engine": {"max_context_tokens": 256},
        "eval": {"num_tasks": 0, "benchmarks": json.loads(json.dumps([entry]).replace("FILE", str(file)))},
    }
    return Config.parse(given | values)


def test_the_keys_of_a_file_go_over_the_runs(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"name": "FILE", "samples": 2, "max_tokens": 6}, KEYS, rollout={"temperature": 0.5})
    (one,) = load_benchmarks(config)
    assert (one.name, str(one), one.num_rollouts) == ("mine", "mine (3 tasks x 2)", 6)
    rollout = one.settings.rollout
    assert (rollout.max_tokens, rollout.timeout_s, rollout.temperature) == (6, 7.0, 0.5)
    assert (one.settings.sandbox.wall_s, one.settings.workflow) == (2.0, KEYS["workflow"])
    specs = eval_specs("eval-before-0-mine", one.tasks, 0, one.samples, one.name)
    assert specs[0].seed == eval_specs("eval-before-0", one.tasks, 0)[0].seed
    assert [spec.session_id for spec in specs[2:4]] == ["eval-before-0-mine-00002", "eval-before-0-mine-00000-1"]
    assert len({spec.seed for spec in specs}) == 6


def test_success_is_what_the_file_says_whatever_the_run_calls_one(tmp_path: Path) -> None:
    for keys, expected in ((KEYS, 1.0), (KEYS | {"eval": KEYS["eval"] | {"success_reward": 2.0}}, 2.0)):
        config = config_of(tmp_path, "FILE", keys)
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"success_reward": 5.0})})
        assert [one.success_reward for one in load_benchmarks(config)] == [expected]


def test_it_is_told_before_the_run_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path, "FILE", KEYS, run_dir=str(tmp_path / "run"))
    assert "4 to train on, 0 held out, benchmarks mine (3 tasks x 1);" in Preflight.check(config).summary()


@pytest.mark.parametrize(
    ("entry", "changes", "message"),
    [
        ("gsm9k", {}, "benchmark 'gsm9k': there is no such benchmark; there are aime24, "),
        ("none.yaml", {}, "cannot read the config 'none.yaml'"),
        ("math500", {}, "math500, whose entry may set max_tokens and num_tasks: rollout.max_tokens is 27648, and"),
        ({"name": "FILE", "num_tasks": 5}, {}, "mine: num_tasks is 5, but there are only 4 such"),
        ("FILE", {"eval": {"tasks": f"{__name__}:load"}}, "mine has num_tasks 0, so there is nothing to evaluate"),
        ("FILE", {"eval": {"num_tasks": 1, "tasks": "none.jsonl"}}, "mine: cannot read 'none.jsonl'"),
        ("FILE", {"workflow": "nowhere:play"}, "workflow: 'nowhere:play' cannot be imported"),
        ("FILE", {"eval": 3}, "mine, whose entry may set max_tokens and num_tasks: "),
        ("FILE", {"seed": 7}, "mine sets seed, which is one for the whole run; move it into the config"),
        ("FILE", {"rollout": {"train_roots": "main"}}, "mine sets rollout.train_roots, which is one for the whole run"),
        ("FILE", {"sandbx": {"wall_s": 1}}, "unknown key 'sandbx'; did you mean 'sandbox'?"),
        ("FILE", {"workflow": "envs.terminal.workflow:solve", "sandbox": {"backend": "jail"}}, "needs 'docker'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path: Path, entry: Any, changes: Any, message: str) -> None:
    config = config_of(tmp_path, entry, KEYS | changes, run_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        Preflight.check(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval": {"benchmarks": ["aime24", {"name": "my/aime24.yaml"}]}}, "benchmarks has 'aime24' twice"),
        ({"rollout": {"gateway_url": "http://h"}, "engine": {"url": "http://e"}}, "eval.benchmarks has no effect with"),
    ],
)
def test_what_a_config_refuses(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    online = {"workflow": None, "tasks": None} if "rollout" in values else {}
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, "aime24", {}, **values, **online)


def test_a_report_has_the_figures_of_each() -> None:
    answers = [
        EvalAnswer(session_id=str(n), task_id=str(n % 2), reward=float(n > 0), num_tokens=3, steps=(4,))
        for n in range(4)
    ]
    mine = EvalReport.of(answers, success_reward=1.0)
    metrics = replace(EvalReport.of([], success_reward=1.0), benchmarks={"mine": mine}).metrics()
    assert metrics["eval/mine/success"] == 0.75 and metrics["eval/mine/num_tasks"] == 2
    assert all(name.startswith("eval/mine/") for name in metrics)


@pytest.mark.slow
def test_a_run_evaluates_them(tmp_path: Path, small_model: Path) -> None:
    config = config_of(
        tmp_path,
        {"name": "FILE", "samples": 2},
        KEYS,
        **{"model": str(small_model), "steps": 1, "batch_size": 2, "group_size": 2, "observe": {"progress": "none"}},
        rollout={"workers": 2, "max_tokens": 8},
    )
    folder = tmp_path / "run"
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    first = run("areal_agent.train", "--config", str(tmp_path / "c.yaml"), f"run_dir={folder}", "steps=1")
    assert first.returncode == 0, first.stderr
    resumed = run("areal_agent.train", "--resume", str(folder), "steps=2", "rollout.workers=0")
    assert resumed.returncode == 0, resumed.stderr
    assert "success on mine: 1.000 -> 1.000" in resumed.stdout
    assert json.loads((folder / "summary.json").read_text())["benchmarks"] == {"mine": {"before": 1.0, "after": 1.0}}
    rows = evaluation_rows(read_metrics(folder / "metrics.jsonl"))
    assert [(row["label"], row["eval/mine/success"]) for row in rows] == [
        ("before", 1.0),
        ("after", 1.0),
        ("after", 1.0),
    ]
    with reading(folder / "ledger.sqlite") as snapshot:
        names = list(questions.eval_endings(snapshot))
        played = questions.trajectory(snapshot, "eval-before-0-mine-00002-1")
    assert len(names) == 18
    assert verify(folder / "ledger.sqlite").is_ok
    assert (played.group_id, played.turns[0].sampling.max_tokens) == ("eval-before-0-mine", 5)
