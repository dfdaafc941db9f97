"""The way to an engine on another machine: a local socket, each connection of which leads there.

Run as `python -I -S way.py SOCKET`; it prints a line once it listens. Docker's own command line makes each connection,
as `DOCKER_HOST` and its other variables say. All else here speaks to a local socket, so streams, builds and the keeper
are the same for every engine. The way outlives its host, whose containers the keeper has yet to remove.
"""

import os
import select
import shutil
import socket
import subprocess
import sys
import time

PATIENCE_S = 40.0
DIAL = ("docker", "system", "dial-stdio")


def serve(listener: socket.socket) -> None:
    """Lead connections away until the host has been gone for `PATIENCE_S`."""
    sources, end_s = [listener, sys.stdin], None
    while end_s is None or time.monotonic() < end_s:
        readable, _, _ = select.select(sources, [], [], None if end_s is None else max(0.0, end_s - time.monotonic()))
        if listener in readable:
            connection, _ = listener.accept()
            with connection:
                subprocess.Popen(DIAL, stdin=connection.fileno(), stdout=connection.fileno())
        if sys.stdin in readable:
            sources, end_s = [listener], time.monotonic() + PATIENCE_S


def main() -> None:
    path = sys.argv[1]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            print("ready", flush=True)
            serve(listener)
    finally:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


if __name__ == "__main__":
    main()
