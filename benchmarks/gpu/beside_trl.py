"""TRL's GRPOTrainer on a GPU, with the settings and tasks of the real model's runs: seconds a step, success over time.

    python benchmarks/gpu/beside_trl.py [--device cuda] model=FOLDER [key=value ...]

Where TRL is not installed, the table says so.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from statistics import median

from areal_agent.config import Config
from benchmarks.gpu.sums import load
from benchmarks.gpu.training import REAL, REAL_CONFIG
from benchmarks.real_model.learning import train_by_trl


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu/beside_trl.py", description="TRL on a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    header = "| side | s a step, first | median of the others |\n|---|---|---|\n| TRL |"
    if find_spec("trl") is None:
        print(header, "not installed | |")
        return 0
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    config = Config.load(REAL_CONFIG, [*REAL, f"trainer.dtype={dtype}", *args.overrides])
    tasks, held_out = load("train", config.seed), load("test", config.seed)
    done = train_by_trl(config, tasks, held_out, sys.executable, os.cpu_count() or 1, args.device)
    first, *others = done.steps_s
    print(header, f"{first:.2f} | {median(others):.3f} |")
    print("\n| step | s of training | success |\n|---|---|---|")
    for step, seconds, success in done.points:
        print(f"| {step} | {seconds:.1f} | {success:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
