"""The project's commands as processes of a test."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*args: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGS` to its end, in a folder of the user's with the project on the path."""
    own = str(ROOT) if folder != ROOT else None
    path = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1500,
    )


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


def until_step(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    """Wait until the run in the folder has done so many steps."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"kind":"step"') < number:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
