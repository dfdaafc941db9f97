"""A run with engine and trainer on one device, in one command: times, log-probabilities of both, success, and memory.

    python benchmarks/gpu/training.py [--real] [--device cuda] [key=value ...]

It is the quickstart, or with `--real` configs/smollm2.yaml with questions that need no package (sums.py). The tables
have each metric of the first step, its median and its most over the others; success over the seconds since the
command, and when the first answer was there; and memory as the doctor predicts it beside what it was. Logs are kept in
the temporary folder.
"""

import argparse
import asyncio
import math
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from areal_agent.config import Config
from areal_agent.doctor.findings import GIB
from areal_agent.doctor.machines import this_machine
from areal_agent.doctor.memory import estimate
from areal_agent.doctor.model import ModelShape
from areal_agent.observe.metrics import Row, evaluation_rows, numbers_of, read_metrics, step_rows
from areal_agent.process import ENDING_WITH_US

QUICKSTART = "configs/quickstart.yaml"
REAL_CONFIG = "configs/smollm2.yaml"
REAL = ("workflow=benchmarks.real_model.workflow:solve", "tasks=benchmarks.gpu.sums:load")
SHOWN = (
    *(f"seconds/{what}" for what in ("wall", "trainer/waiting_for_rollouts", "trainer/training", "trainer/pushing")),
    "seconds/trainer/saving",
    *(f"push/{what}_s" for what in ("send", "stall", "pause", "transfer", "resume")),
    *(f"tokens_per_s/{what}" for what in ("generated", "trained")),
    "trainer/mfu",
    *(f"trainer/logp_diff_{what}" for what in ("mean", "max", "fresh_max")),
    *(f"rollouts/{what}" for what in ("seconds", "spanning")),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu/training.py", description="A run on one device.")
    parser.add_argument("--real", action="store_true", help="a real model, which `model=FOLDER` names")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    run, file = Path(tempfile.mkdtemp(prefix="run-")) / "run", REAL_CONFIG if args.real else QUICKSTART
    overrides = [f"run_dir={run}", f"engine.device={args.device}", f"trainer.device={args.device}"]
    overrides += ["observe.progress=plain", *(REAL if args.real else ()), *args.overrides]
    started_s = time.time()
    command = [*ENDING_WITH_US, sys.executable, "-m", "areal_agent.train", "--config", file, *overrides]
    code, peak_bytes = watched(command)
    metrics = run / "metrics.jsonl"
    all_rows = read_metrics(metrics) if metrics.is_file() else []
    rows = [numbers_of(row) for row in step_rows(all_rows)]
    if len(rows) < 2:
        return code or 1  # it has said why
    print("\n| metric | first step | median of the others | most |\n|---|---|---|---|")
    for name in SHOWN:
        if len(values := [row[name] for row in rows if name in row]) > 1:
            first, *others = values
            print(f"| {name} | {first:.4g} | {statistics.median(others):.4g} | {max(others):.4g} |")
    report_success(run, evaluation_rows(all_rows), started_s)
    config = Config.load(file, overrides)
    shape = ModelShape.read(run / "model" if (run / "model").is_dir() else Path(config.model))
    positions = [row["trainer/num_input_tokens"] - row["trainer/shared_positions"] for row in rows]
    batches = [row["trainer/num_micro_batches"] for row in rows]
    tokens = max(math.ceil(one / number) for one, number in zip(positions, batches, strict=True))
    overrides += [f"trainer.tokens_per_micro_batch={tokens}"]  # those that there were, not those that were allowed
    report_memory(shape, Config.load(file, overrides), rows[-1], peak_bytes)
    return code


def report_success(run: Path, evaluations: Sequence[Row], started_s: float) -> None:
    """Print what there was after how many seconds: the first answer, and the success of held-out tasks."""
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        first_s: float = ledger.execute("SELECT min(ended_s) FROM turns").fetchone()[0]
    print("\n| s since the command | step | success |\n|---|---|---|")
    print(f"| {first_s - started_s:.1f} | the first answer | |")
    for row in evaluations:
        print(f"| {row['time'] - started_s:.1f} | {row['step']} | {row['eval/success']:.2f} |")


def watched(command: Sequence[str]) -> tuple[int, int]:
    """Run a command; return its exit code, and the most memory of the GPU that was taken meanwhile beyond before."""
    before = peak = used_mib()
    process = subprocess.Popen(command)
    while process.poll() is None:
        peak = max(peak, used_mib())
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.3)
    return process.returncode, (peak - before) * 2**20


def used_mib() -> int:
    """Return what all processes together take of the first GPU; 0 without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(told[0]) if told and told[0].isdigit() else 0


def report_memory(shape: ModelShape, config: Config, last: dict[str, float], peak_bytes: int) -> None:
    """Print the doctor's prediction beside what was measured: on a GPU the trainer's tensors and all that was taken."""
    machine, is_gpu = asyncio.run(this_machine()), config.trainer.device == "cuda"
    parts = estimate(shape, config, machine)[0 if is_gpu else None]
    trainer = sum(size for what, size in parts.items() if what.startswith("trainer:") and what != "trainer: CUDA")
    key = "trainer/peak_device_memory_bytes" if is_gpu else "memory/trainer_peak_bytes"
    print("\n| GiB | predicted | measured |\n|---|---|---|")
    print(f"| trainer | {trainer / GIB:.2f} | {last.get(key, 0.0) / GIB:.2f} |")
    if is_gpu:
        print(f"| the GPU | {parts.total() / GIB:.2f} | {peak_bytes / GIB:.2f} |")
    print("\nthe prediction: " + ", ".join(f"{what} {size / GIB:.2f}" for what, size in parts.most_common()))


if __name__ == "__main__":
    sys.exit(main())
