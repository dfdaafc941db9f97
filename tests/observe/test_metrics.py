"""metrics.jsonl.

1. rows come back in order, and are in the file at once; 2. what is not finite is null; 3. numpy's numbers are
numbers; 4. a torn last line is skipped by readers, 5. and removed when the log is reopened; 6. a broken line before
the last is an error that names it; 7. reopening keeps the rows that are there; 8. a row that a full disk takes only in
part is an error, and leaves the rows before it.
"""

import resource
from pathlib import Path

import numpy as np
import pytest

from areal_agent.errors import ArealAgentError
from areal_agent.observe.metrics import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_are_in_the_file_at_once_and_in_order(path: Path) -> None:
    log = MetricsLog(path)
    for step in range(3):
        log.append({"step": step, "reward/mean": step / 2})
        assert read_metrics(path)[-1] == {"step": step, "reward/mean": step / 2}
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_what_is_not_finite_is_null(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"nan": float("nan"), "inf": float("inf"), "numpy": np.float32("nan")})
    log.close()
    assert path.read_text() == '{"nan":null,"inf":null,"numpy":null}\n'


def test_numpy_numbers_are_numbers(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"float": np.float32(0.5), "int": np.int64(3), "bool": np.bool_(True)})
    log.close()
    assert read_metrics(path) == [{"float": 0.5, "int": 3, "bool": True}]


def test_readers_skip_a_torn_last_line(path: Path) -> None:
    path.write_text('{"step":1}\n{"step":2,"rew')
    assert read_metrics(path) == [{"step": 1}]


def test_reopening_removes_a_torn_last_line_and_keeps_the_rest(path: Path) -> None:
    path.write_text('{"step":1}\n{"step":2,"rew')
    log = MetricsLog(path)
    log.append({"step": 2})
    log.close()
    assert path.read_text() == '{"step":1}\n{"step":2}\n'


def test_a_file_of_one_torn_line_starts_anew(path: Path) -> None:
    path.write_text('{"ste')
    MetricsLog(path).close()
    assert path.read_text() == ""


def test_a_broken_line_before_the_last_is_an_error(path: Path) -> None:
    path.write_text('{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(ArealAgentError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics(path)


def test_a_row_that_a_full_disk_takes_in_part_is_not_there(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(ArealAgentError, match=r"could not be written: .*; make room"):
            log.append({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.append({"step": 3})
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
