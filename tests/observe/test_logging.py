"""The log file of a process, and its peak memory.

- A line has time, level and name, and warnings are logged too; a second process appends.
- Libraries that log a line a request are heard from WARNING on.
- Peak memory is at least what the process once held; a process that is gone has none.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agent.observe.logging import peak_memory_bytes

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


def test_the_log_of_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = path.read_text().splitlines()
    assert lines[0][:2] == "20" and lines[0].endswith("INFO    areal_agent.engine: loaded tiny")
    assert any("py.warnings" in line and "UserWarning: old" in line for line in lines)
    assert any("WARNING httpx: slow" in line for line in lines)
    assert not any("HTTP Request" in line for line in lines), "libraries are heard from WARNING on"
    assert sum("loaded tiny" in line for line in lines) == 2, "the second process appends"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_it_holds_what_was_held_once() -> None:
    size = 64 * 2**20
    assert len(bytearray(b"x" * size)) == size  # and it is gone again
    peak = peak_memory_bytes(os.getpid())
    assert peak is not None
    assert peak > size


def test_a_process_that_is_gone_has_none() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert peak_memory_bytes(done.pid) is None
