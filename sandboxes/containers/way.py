"""The way to an engine on another machine: a local socket, each connection of which leads there.

Run as `python -I -S way.py SOCKET`; it prints a line once it listens. Docker's own command line makes each connection,
as `DOCKER_HOST` and its other variables say. All else here speaks to a local socket, so streams, builds and the keeper
are the same for every engine. The way is there until nobody holds the other end of its stdin: its host, and then the
keeper, which has yet to remove the host's containers.
"""

import os
import select
import shutil
import socket
import subprocess
import sys

DIAL = ("docker", "system", "dial-stdio")


def serve(listener: socket.socket) -> None:
    """Lead connections away until stdin ends."""
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            subprocess.Popen(DIAL, stdin=connection.fileno(), stdout=connection.fileno())


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
