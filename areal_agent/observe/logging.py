"""The log of a process, its warnings for a person, and the peak memory of a process."""

import logging
from collections.abc import Callable
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

CHATTY = ("aiohttp.access", "httpcore", "httpx", "openai")
"""Libraries that log a line per request: thousands a minute here. Their warnings are kept."""


def log_to_file(path: Path, level: int = logging.INFO) -> None:
    """Append everything that this process logs to `path`. A process's entry point calls it once."""
    logging.basicConfig(filename=path, level=level, format=FORMAT, encoding="utf-8", force=True)
    _calm(level)


def log_to_output(level: int = logging.INFO) -> None:
    """Log to the output of a process whose output is a log file already (process.py)."""
    logging.basicConfig(level=level, format=FORMAT, force=True)
    _calm(level)


def _calm(level: int) -> None:
    logging.captureWarnings(True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class _Shown(logging.Handler):
    """Shows warnings to a person, without their tracebacks, which are in the file."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings(show: Callable[[str], None]) -> None:
    """Also pass every logged warning and error to `show`, as one text. Call it after `log_to_file`."""
    logging.getLogger().addHandler(_Shown(show))


def peak_memory_bytes(pid: int) -> int | None:
    """Return the peak of a process's resident memory; None when the process is gone or the system is not Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    marks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(marks[0]) * 1024 if marks else None
