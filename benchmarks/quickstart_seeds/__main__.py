"""Runs the quickstart once per seed, model building included, and shows whether it learns for at least 4 of 5 seeds.

    python benchmarks/quickstart_seeds [--seeds 0 1 2 3 4] [--out DIR] [key=value ...]

The seed determines the model's initialisation, its demonstrations, the order of tasks, sampling and training. Every run
starts with an empty model cache. The target: success on 200 held-out questions from at most 0.5 to at least 0.9, within
360 seconds on two cores.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_BEFORE, MIN_AFTER, MAX_WALL_S, MIN_SHARE = 0.5, 0.9, 360.0, 0.8
COLUMNS = ("seed", "before", "after", "wall_s", "steps", "spanning", "interrupted", "staleness", "verified", "met")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/quickstart_seeds", description="The quickstart, once a seed."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        rows = [run_one(seed, out / f"seed{seed}", args.overrides) for seed in args.seeds]
    num_met = sum(row["met"] for row in rows)
    median_s = statistics.median(row["wall_s"] for row in rows)
    print(f"\n{num_met} of {len(rows)} seeds met the target; median {median_s:.0f} s")
    return 0 if num_met >= MIN_SHARE * len(rows) else 1


def run_one(seed: int, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Run one quickstart in a process of its own, and print its row."""
    with tempfile.TemporaryDirectory() as cache:
        command = ["areal_agent.train", "--config", "configs/quickstart.yaml", f"seed={seed}", f"run_dir={run_dir}"]
        run([*command, "observe.progress=none", *overrides], AREAL_AGENT_CACHE=cache)
    is_verified = run(["areal_agent.ledger", "verify", str(run_dir)]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after, wall_s = summary["success_before"], summary["success_after"], summary["wall_s"]
    row = {
        "seed": seed,
        "before": before,
        "after": after,
        "wall_s": wall_s,
        "steps": summary["steps"],
        "spanning": summary["spanning_fraction"],
        "interrupted": summary["interrupted_completions"],
        "staleness": summary["max_staleness_seen"],
        "verified": is_verified,
        "met": before <= MAX_BEFORE and after >= MIN_AFTER and wall_s <= MAX_WALL_S and is_verified,
    }
    print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |", flush=True)
    return row


def run(module: list[str], **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", *module], cwd=ROOT, env=os.environ | environment, stdout=subprocess.DEVNULL, check=False
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
