"""The project's commands as processes of a test, in the project's folder."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGS` to its end."""
    return subprocess.run([sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, timeout=2400)


@contextmanager
def started(*args: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start `python -m ARGS`, whose output can be read line by line; kill it at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", *args],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
