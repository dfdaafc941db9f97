"""The agent's way into a container, into a Python on this machine.

1. It serves, whether that Python takes what was compiled here or, of another version, compiles the source; 2. it ends
with its stream.
"""

import subprocess
import sys

import pytest

from sandboxes.containers.agent.wire import HEADER, Tell
from sandboxes.containers.agent_link import COMMAND, boot_data

PATIENCE_S = 60.0
OTHER_VERSION = b"\0\0\r\n"


@pytest.mark.parametrize("options", [{}, {"version": OTHER_VERSION}], ids=["same", "other"])
def test_it_serves_and_ends_with_its_stream(options: dict[str, bytes]) -> None:
    data = boot_data(b"", **options)
    agent = subprocess.run([sys.executable, *COMMAND[1:]], input=data, capture_output=True, timeout=PATIENCE_S)
    assert agent.stderr == b""
    kind, number, num_bytes = HEADER.unpack_from(agent.stdout)
    assert (kind, number, num_bytes, len(agent.stdout)) == (Tell.READY, 0, 1, HEADER.size + 1)
