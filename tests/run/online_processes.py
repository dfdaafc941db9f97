"""The commands of online RL as processes of a test. Not a test."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
KEY = "a-key-for-this-test"
LIMIT_S = 150.0


@contextmanager
def running(log: Path, *args: str) -> Generator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        environment = {**os.environ, "AREAL_AGENT_ADMIN_KEY": KEY, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, *args], stdout=file, stderr=file, env=environment, cwd=log.parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], log: Path, process: subprocess.Popen[bytes]) -> None:
    """Until other processes have come so far."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def config(tmp_path: Path, model: Path, engine_url: str, gateway_url: str, **values: object) -> Path:
    path = tmp_path / "online.yaml"
    settings = {
        "model": str(model),
        "run_dir": str(tmp_path / "run"),
        "steps": 5,
        "batch_size": 2,
        "group_size": 2,
        "max_staleness": 2,
        "trainer": {"checkpoint_every": 2},
        "engine": {"url": engine_url},
        "rollout": {"gateway_url": gateway_url},
    }
    path.write_text(yaml.safe_dump(settings | values))
    return path
