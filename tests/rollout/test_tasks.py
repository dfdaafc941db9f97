"""Tasks from rows: 1. of a function, JSONL, Parquet, a saved data set, a folder of data files; 2. columns are named
anew, a filter chooses, ids are unique; 3. mixed sources bear their names; 4. every fault names its place; 5. a split
that is not there is an error, never another split; 6. what JSON does not keep is refused for workers."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_agent import ConfigError, Task
from areal_agent.rollout.config import TasksConfig
from areal_agent.rollout.tasks import load_tasks, require_json

ROWS = [{"id": "a", "question": "1 + 1?", "level": 1}, {"id": "b", "question": "2 * 3?", "level": 2}]


def load(asked_for: str = "train", /, **config: object) -> list[tuple[str, dict]]:
    tasks = load_tasks(TasksConfig.model_validate(config), asked_for, 0)
    return [(task.id, dict(task.data)) for task in tasks]


def jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A module of the user's."""
    (tmp_path / "my_tasks.py").write_text(
        "def load(split, seed, count):\n    return [{'n': n, 'of': split} for n in range(count)]\n"
        "def is_even(data):\n    return data['n'] % 2 == 0\n"
        "NUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "my_tasks"


def test_a_function_is_called_with_split_and_args(module: str) -> None:
    tasks = load("test", source=f"{module}:load", args={"count": 2})
    assert tasks == [("0", {"n": 0, "of": "test"}), ("1", {"n": 1, "of": "test"})]


def test_jsonl_passes_over_blank_lines_and_numbers_what_has_no_id(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "x": 1}\n\n{"x": 2}\n{"id": null, "x": 3}\n')
    assert [id for id, _ in load(source=str(path))] == ["a", "1", "2"]


def test_integers_in_jsonl_keep_all_their_digits(tmp_path: Path) -> None:
    rows = [{"id": "a", "answer": 2**64 + 1, "of": [-(10**30)]}, {"id": "b", "answer": 9999999999999999999}]
    assert [data for _, data in load(source=jsonl(tmp_path / "tasks.jsonl", rows))] == rows


def test_parquet(tmp_path: Path) -> None:
    assert load(source=parquet(tmp_path / "tasks.parquet", ROWS)) == [(row["id"], row) for row in ROWS]


def test_a_saved_data_set_gives_the_split_that_is_asked_for(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list([row]) for name, row in zip(("train", "test"), ROWS, strict=True)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert load("test", source=str(tmp_path / "saved")) == [("b", ROWS[1])]
    assert load("test", source=str(tmp_path / "saved"), split="train") == [("a", ROWS[0])]


def test_a_folder_of_data_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data" / "train.parquet", ROWS)
    args = {"cache_dir": str(tmp_path / "cache")}
    assert load(source=str(tmp_path / "data"), args=args) == [(row["id"], row) for row in ROWS]
    assert [id for id, _ in load(source=str(tmp_path / "data"), args=args, split="train[:50%]")] == ["a"]


def test_columns_are_named_anew_and_the_others_left_out(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "tasks.jsonl", ROWS)
    assert load(source=source, columns={"prompt": "question"})[0] == ("0", {"prompt": "1 + 1?"})
    assert load(source=source, columns={"id": "level"})[0] == ("1", {"id": 1})


def test_a_filter_chooses(module: str) -> None:
    tasks = load(source=f"{module}:load", args={"count": 5}, filter=f"{module}:is_even")
    assert [id for id, _ in tasks] == ["0", "2", "4"]


def test_mixed_sources_bear_their_names(tmp_path: Path, module: str) -> None:
    files = [jsonl(tmp_path / "one.jsonl", ROWS), {"source": parquet(tmp_path / "two.parquet", ROWS), "name": "second"}]
    tasks = load_tasks(
        TasksConfig.model_validate({"source": f"{module}:load", "args": {"count": 1}, "weight": 3, "mix": files}),
        "train",
        0,
    )
    assert [task.id for task in tasks] == ["my_tasks/0", "one/a", "one/b", "second/a", "second/b"]
    assert [(source.name, source.weight) for source in tasks.sources] == [("my_tasks", 3), ("one", 1), ("second", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n{oops\n", r"tasks\.jsonl:2 is not JSON"),
        ("{}\n\n[1]\n", r"tasks\.jsonl:3 is a list, expected an object"),
        ('{"n": ' + "9" * 5000 + "}", r"tasks\.jsonl:1 is not JSON"),
        ("", "has no task for split 'train': it is empty"),
        ('{"id": 7}\n{"id": "7"}\n', r"the id '7' is given twice: \S*tasks\.jsonl:1, and \S*tasks\.jsonl:2"),
    ],
)
def test_faults_in_jsonl_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(source=str(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"source": "none.jsonl"}, r"cannot read 'none\.jsonl': No such file.*looked for from '/"),
        ({"source": "none.parquet"}, r"cannot read 'none\.parquet': No such file"),
        ({"source": "./none"}, r"'\./none' is not a source: there is no such folder"),
        ({"source": "my_tasks.load"}, r"is neither a function \(package\.module:function\)"),
        ({"source": "my_tasks:load"}, r"my_tasks:load\(split='train', .*missing 1 required .*see tasks\.args"),
        ({"source": "my_tasks:none"}, "module 'my_tasks' has no attribute 'none'"),
        ({"source": "my_tasks:NUMBER"}, "is a int, not a function"),
        ({"source": "my_tasks:load", "args": {"count": 0}}, "has no task for split 'train'"),
        (
            {"source": "my_tasks:load", "args": {"count": 1}, "columns": {"x": "m"}},
            r"tasks\.columns: item 0 of my_tasks:load has no column 'm'; it has n, of",
        ),
        (
            {"source": "my_tasks:load", "args": {"count": 1}, "columns": {"x": "n"}, "filter": "my_tasks:is_even"},
            r"tasks\.filter: my_tasks:is_even failed at item 0 of my_tasks:load: KeyError: 'n'",
        ),
        ({"source": "my_tasks:load", "args": {"count": 1}, "filter": "my_tasks:NUMBER"}, "is a int, not a function"),
        ({"source": "my_tasks:load", "args": {"count": 3}, "filter": "my_tasks:load"}, "missing 2 required positional"),
    ],
)
def test_faults_are_named(module: str, config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**config)


def test_a_filter_that_keeps_nothing_is_an_empty_source(tmp_path: Path, module: str) -> None:
    source = jsonl(tmp_path / "odd.jsonl", [{"n": 1}, {"n": 3}])
    with pytest.raises(ConfigError, match="the filter 'my_tasks:is_even' keeps none of its 2 tasks"):
        load(source=source, filter=f"{module}:is_even")


def test_what_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"tasks\.parquet' is not a Parquet file"):
        load(source=str(path))


def test_a_split_that_is_not_there_is_no_other_split(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "alone")
    with pytest.raises(ConfigError, match="has no split 'test'; give one of train"):
        load("test", source=str(tmp_path / "alone"))
    (tmp_path / "files").mkdir()
    jsonl(tmp_path / "files" / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match="split 'test', failed"):
        load("test", source=str(tmp_path / "files"), args={"cache_dir": str(tmp_path / "cache")})


def test_json_may_travel() -> None:
    require_json(
        [Task(id="1", data={"messages": [{"role": "user", "content": "é"}], "n": 1.5, "none": None, "long": -(2**70)})]
    )


@pytest.mark.parametrize("value", [(1, 2), float("nan"), float("inf"), object(), {1: "x"}, "\ud800"], ids=range(6))
def test_what_json_does_not_keep_may_not(value: object) -> None:
    with pytest.raises(ConfigError, match=r"task 'odd' holds data that JSON does not preserve"):
        require_json([Task(id="odd", data={"value": value})])
