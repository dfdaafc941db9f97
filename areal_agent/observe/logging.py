"""The log file of one process. It knows nothing of what is logged.

How much memory a process has held at the most. It knows the files of the kernel and nobody's process.
"""

import logging
from collections.abc import Callable
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

CHATTY = ("aiohttp.access", "httpcore", "httpx", "openai")
"""Libraries that log a line a request: thousands a minute here. Their warnings are kept."""


def log_to_file(path: Path, level: int = logging.INFO) -> None:
    """Send everything that this process logs to `path`, appended. Called once, by a process's entry point."""
    logging.basicConfig(filename=path, level=level, format=FORMAT, encoding="utf-8", force=True)
    _calm(level)


def log_to_output(level: int = logging.INFO) -> None:
    """The same for a process whose output is a log file already (process.py)."""
    logging.basicConfig(level=level, format=FORMAT, force=True)
    _calm(level)


def _calm(level: int) -> None:
    logging.captureWarnings(True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class _Shown(logging.Handler):
    """Hands warnings to a person, without the traceback: that is in the file."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings(show: Callable[[str], None]) -> None:
    """Also hand every warning and error that is logged to `show`, as one text. Called after `log_to_file`."""
    logging.getLogger().addHandler(_Shown(show))


def peak_memory_bytes(pid: int) -> int | None:
    """The high-water mark of a process's resident memory; None where the system does not tell (it is no Linux).

    None too for a process that is gone.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    marks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(marks[0]) * 1024 if marks else None
