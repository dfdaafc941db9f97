"""The keeper: waits for the end of its host, then removes the host's containers, started or not.

Run as `python -I -S keeper.py SOCKET LABEL`. When a host ends, an agent ends its container by itself; the keeper is for
containers that have no agent yet or whose agent is stopped. It uses only the standard library, so that it stays small.
"""

import http.client
import json
import socket
import sys
import time
import urllib.parse
from contextlib import closing

PATIENCE_S = 600.0
"""The daemon may have been killed together with the host, and be down for a while."""

ANSWER_S = 25.0
PAUSE_S = 0.5
NUM_CLEAN_LOOKS = 3
"""Consecutive empty listings to wait for: the daemon may still be making a container when the host ends."""


def ask(path: str, method: str, target: str) -> bytes:
    with closing(http.client.HTTPConnection("engine")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(path)
        connection.request(method, target)
        answer = connection.getresponse()
        if answer.status >= 500:  # a daemon that is just starting
            raise http.client.HTTPException(answer.reason)
        return answer.read()


def remove_all(path: str, label: str) -> int:
    """Remove the containers with a label, and return their number."""
    filters = urllib.parse.quote(json.dumps({"label": [label]}))
    containers = json.loads(ask(path, "GET", f"/containers/json?all=1&filters={filters}"))
    for container in containers:
        ask(path, "DELETE", f"/containers/{container['Id']}?force=1&v=1")
    return len(containers)


def main() -> None:
    path, label = sys.argv[1:]
    sys.stdin.buffer.read()
    deadline_s = time.monotonic() + PATIENCE_S
    num_clean = 0
    while num_clean < NUM_CLEAN_LOOKS and time.monotonic() < deadline_s:
        try:
            num_clean = 0 if remove_all(path, label) else num_clean + 1
        except (OSError, http.client.HTTPException, ValueError):  # the daemon is down for the moment
            num_clean = 0
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
