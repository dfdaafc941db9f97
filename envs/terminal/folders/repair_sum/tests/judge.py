"""The reward is 1 when the tests that failed now pass, and those that passed still do."""

import json
import subprocess
import sys
from pathlib import Path

LISTS = json.loads(Path("/tests/lists.json").read_text())


def does_pass(name: str) -> bool:
    command = [sys.executable, "-m", "unittest", f"test_sums.{name}"]
    return subprocess.run(command, env={"PYTHONPATH": "/tests:/testbed"}, check=False).returncode == 0


passed = [does_pass(name) for name in (*LISTS["FAIL_TO_PASS"], *LISTS["PASS_TO_PASS"])]
Path("/logs/verifier/reward.txt").write_text(str(int(all(passed))))
