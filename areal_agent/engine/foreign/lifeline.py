"""Ends a server with the process that started it. For launchers, which run in environments without areal_agent.

A server is several processes with a session of their own, and none may be left behind. This file uses only the
standard library, so that a launcher can load it by its path.
"""

import os
import signal
import threading
from typing import NoReturn

LIFELINE_VARIABLE = "AREAL_AGENT_LIFELINE_FD"  # as process.py has it


def end_with_parent() -> None:
    """Kill this process and its children, which have a session of their own, as soon as the parent is gone."""
    lifeline = os.environ.get(LIFELINE_VARIABLE)
    if lifeline is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C does
        threading.Thread(target=_wait_for_end, args=(int(lifeline),), name="lifeline", daemon=True).start()


def _wait_for_end(fd: int) -> NoReturn:
    while os.read(fd, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
