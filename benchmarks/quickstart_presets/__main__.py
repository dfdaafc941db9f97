"""Runs the quickstart once per preset, `algorithm=PRESET` and nothing else changed, and shows whether each improves it.

    python benchmarks/quickstart_presets [--presets rloo grpo ppo gspo cispo] [--seed 0] [--out DIR] [key=value ...]

The target: success on 200 held-out questions of more than 0.8 after 70 steps, and a ledger that verifies. `lowest` is
the lowest mean success of five steps in a row after the first twenty, which shows a run that falls and rises again.
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

from areal_agent.process import ENDING_WITH_US

ROOT = Path(__file__).parents[2]
PRESETS = ("rloo", "grpo", "ppo", "gspo", "cispo")
MIN_AFTER = 0.8
WINDOW, FIRST = 5, 20
COLUMNS = ("preset", "before", "after", "lowest", "wall_s", "verified", "met")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/quickstart_presets", description="The quickstart, once a preset."
    )
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        rows = [run_one(preset, out / preset, [f"seed={args.seed}", *args.overrides]) for preset in args.presets]
    num_met = sum(row["met"] for row in rows)
    print(f"\n{num_met} of {len(rows)} presets met the target")
    return 0 if num_met == len(rows) else 1


def run_one(preset: str, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Run one quickstart in a process of its own, and print its row."""
    command = ["areal_agent.train", "--config", "configs/quickstart.yaml", f"algorithm={preset}", f"run_dir={run_dir}"]
    run([*command, "observe.progress=none", *overrides])
    is_verified = run(["areal_agent.ledger", "verify", str(run_dir)]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    row = {
        "preset": preset,
        "before": summary["success_before"],
        "after": summary["success_after"],
        "lowest": lowest(run_dir / "metrics.jsonl"),
        "wall_s": summary["wall_s"],
        "verified": is_verified,
        "met": (summary["success_after"] or 0.0) > MIN_AFTER and is_verified,
    }
    print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |", flush=True)
    return row


def lowest(metrics: Path) -> float | None:
    """Return the lowest mean success of `WINDOW` steps in a row from step `FIRST` on; None for a shorter run."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    successes = [float(row["reward/success"]) for row in rows if "reward/success" in row][FIRST:]
    means = [statistics.fmean(successes[start : start + WINDOW]) for start in range(len(successes) - WINDOW + 1)]
    return round(min(means), 3) if means else None


def run(module: list[str]) -> int:
    argv = [*ENDING_WITH_US, sys.executable, "-m", *module]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
