"""The agent's way into a container, into a Python on this machine.

It serves, and ends with its stream.
"""

import subprocess
import sys

from sandboxes.agent.wire import HEADER, Tell
from sandboxes.link import COMMAND, boot_data

PATIENCE_S = 60.0


def test_it_serves_and_ends_with_its_stream() -> None:
    agent = subprocess.run(
        [sys.executable, *COMMAND[1:]], input=boot_data(b""), capture_output=True, timeout=PATIENCE_S
    )
    assert agent.stderr == b""
    kind, number, num_bytes = HEADER.unpack_from(agent.stdout)
    assert (kind, number, num_bytes, len(agent.stdout)) == (Tell.READY, 0, 2, HEADER.size + 2)
