"""Tasks: 1. from a function, 2. from JSONL, 3. faults are named; 4. each epoch uses every task once, in an order that
depends on the seed alone; 5. what JSON does not keep is refused for workers."""

from collections import Counter

import pytest

from areal_agent import ConfigError, Task
from areal_agent.rollout.config import TasksConfig
from areal_agent.rollout.tasks import TaskStream, load_tasks, require_json


def test_from_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "def load(split, seed, count):\n    return [{'n': n} for n in range(count)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tasks = load_tasks(TasksConfig(source="my_tasks:load", args={"count": 2}), "train", 0)
    assert [(task.id, task.data["n"]) for task in tasks] == [("0", 0), ("1", 1)]


def test_from_jsonl(tmp_path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "x": 1}\n\n{"x": 2}\n')
    assert [(task.id, task.data["x"]) for task in load_tasks(TasksConfig(source=str(path)), "train", 0)] == [
        ("a", 1),
        ("1", 2),
    ]


@pytest.mark.parametrize(
    ("text", "message"), [("{}\n{oops\n", "tasks.jsonl:2 is not JSON"), ("[1]\n", "task 0 is a list"), ("", "no task")]
)
def test_faults_in_jsonl_are_named(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tasks(TasksConfig(source=str(path)), "train", 0)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read '.*none\.jsonl': No such file"):
        load_tasks(TasksConfig(source=str(tmp_path / "none.jsonl")), "train", 0)


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'oops'"):
        load_tasks(TasksConfig(source="envs.calculator.tasks:load", args={"oops": 1}), "train", 0)


def test_each_epoch_uses_every_task_once() -> None:
    stream = TaskStream([Task(id=str(n), data={}) for n in range(5)], seed=1)
    for epoch in range(3):
        ids = Counter(stream.at(epoch * 5 + offset).id for offset in range(5))
        assert set(ids.values()) == {1}


def test_the_order_depends_on_the_seed_alone() -> None:
    tasks = [Task(id=str(n), data={}) for n in range(20)]
    forward = [TaskStream(tasks, seed=1).at(n).id for n in range(40)]
    stream = TaskStream(tasks, seed=1)
    assert [stream.at(n).id for n in reversed(range(40))] == forward[::-1]
    assert [TaskStream(tasks, seed=2).at(n).id for n in range(40)] != forward


def test_json_may_travel() -> None:
    require_json([Task(id="1", data={"messages": [{"role": "user", "content": "é"}], "n": 1.5, "none": None})])


@pytest.mark.parametrize("value", [(1, 2), float("nan"), object(), {1: "x"}, 2**70, "\ud800"], ids=range(6))
def test_what_json_does_not_keep_may_not(value: object) -> None:
    with pytest.raises(ConfigError, match=r"task 'odd' holds what JSON does not keep"):
        require_json([Task(id="odd", data={"value": value})])
