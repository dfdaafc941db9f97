"""The log file of a process.

1. what is logged is in the file with time, level and name, and warnings too; 2. libraries that log a line a request are
heard from WARNING on; 3. a second process appends.
"""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import logging, sys, warnings
from pathlib import Path
from areal_agent.observe.logging import log_to_file
log_to_file(Path(sys.argv[1]))
logging.getLogger("areal_agent.engine").info("loaded %s", "tiny")
logging.getLogger("httpx").info("HTTP Request: POST")
logging.getLogger("httpx").warning("slow")
warnings.warn("old")
"""


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """The log after two processes."""
    path = tmp_path / "engine.log"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return path.read_text().splitlines()


def test_lines_have_time_level_and_name(lines: list[str]) -> None:
    assert lines[0].endswith("INFO    areal_agent.engine: loaded tiny")
    assert lines[0][:2] == "20"
    assert any("py.warnings" in line and "UserWarning: old" in line for line in lines)


def test_chatty_libraries_are_heard_from_warning_on(lines: list[str]) -> None:
    assert not any("HTTP Request" in line for line in lines)
    assert any("WARNING httpx: slow" in line for line in lines)


def test_a_second_process_appends(lines: list[str]) -> None:
    assert sum("loaded tiny" in line for line in lines) == 2
