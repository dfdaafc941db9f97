"""The zygote: a Python behind the walls that has all that a jail needs and forks the first process of each jail.

Bubblewrap or `enter.py` runs it as the first process behind walls that keep the host out; `inside.py` then puts walls
between the jails. Starting a Python for each jail would cost ten times as much as a fork. The zygote reads only what
its host sends, and no program runs in it. `Zygote` in `bubblewrap.py` is the host's end.

::

    host ── a cell's limits + its control socket ──▶ zygote ── fork ──▶ first process of a jail (`inside.py`)
         ◀── HELLO, once ───────────────────────           ◀── its end ──
"""

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

from sandboxes.inner.inside import serve_cell, tell_failure, telling_the_host
from sandboxes.inner.launcher import control_socket
from sandboxes.inner.namespaces import NEW_PIDS, own_processes, start_children_in, unshare
from sandboxes.inner.processes import forget_package
from sandboxes.inner.program import Interpreter
from sandboxes.inner.wire import MAX_CELL, REPORT, ReportKind


def serve(control: socket.socket, config: dict[str, Any]) -> None:
    """Fork jails until the host is gone; the end of this process ends all others."""
    interpreter = Interpreter(config["env"])
    forget_package()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with telling_the_host(control):
        processes = own_processes()
    with contextlib.suppress(ConnectionError):  # the host is gone, which the next read will show
        control.sendall(REPORT.pack(ReportKind.HELLO, 0, 0, 0, 0))
    while True:
        frame, descriptors, _, _ = socket.recv_fds(control, MAX_CELL, 1)
        if not frame:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as cell:
            try:
                start_children_in(processes)  # out of the last jail's, where unshare fails
                unshare(NEW_PIDS)
                pid = os.fork()
            except OSError as error:
                tell_failure(cell, error)
                continue
            if pid == 0:
                control.close()
                os.close(processes)
                serve_cell(cell, interpreter, config | json.loads(frame))


def main() -> None:
    serve(control_socket(int(sys.argv[1])), json.loads(sys.argv[2]))
