"""Peak memory: 1. of this process it is at least what it once held; 2. of a process that is gone there is none."""

import os
import subprocess
import sys

import pytest

from areal_agent.observe.logging import peak_memory_bytes


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
