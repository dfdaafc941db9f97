"""The two configs of code rewards, run as a user runs them: each learns, in jails or in Docker containers, and its
ledger proves the run.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from sandboxes import open_pool

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, timeout=2400)


async def try_backend(backend: str) -> None:
    async with open_pool(backend=backend) as pool, pool.acquire() as box:
        await box.exec(["true"])


@pytest.mark.parametrize(("config", "backend"), [("code", "bubblewrap"), ("code_docker", "docker")])
def test_it_learns(config: str, backend: str, tmp_path: Path) -> None:
    try:
        asyncio.run(try_backend(backend))
    except SandboxError as error:
        pytest.skip(str(error))
    folder = tmp_path / "run"
    done = run("areal_agent.train", "--config", f"configs/{config}.yaml", f"run_dir={folder}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["success_before"] <= 0.5
    assert summary["success_after"] >= summary["success_before"] + 0.25
    assert run("areal_agent.ledger", "verify", str(folder)).returncode == 0
