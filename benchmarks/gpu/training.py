"""A run with engine and trainer on one device, in one command: times, a push, log-probabilities of both, and memory.

    python benchmarks/gpu/training.py [--shape 0.6B] [--device cuda] [key=value ...]

Without a shape it is the quickstart. With one, the model is a random Qwen3 of that shape, and the answers are those of
`benchmarks/async --workloads long`: of drawn lengths, rewarded by a coin. The tables have medians over the steps after
the first, and memory as the doctor predicts it beside what it was. Logs are kept in the temporary folder.
"""

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from areal_agent.config import Config
from areal_agent.doctor.findings import GIB
from areal_agent.doctor.machines import this_machine
from areal_agent.doctor.memory import estimate
from areal_agent.doctor.model import ModelShape
from areal_agent.models.recipe import train_tokenizer
from areal_agent.observe.metrics import numbers_of, read_metrics, step_rows
from areal_agent.process import ENDING_WITH_US
from benchmarks.engine.model import GPU_SHAPES, SHAPES, build_weights

QUICKSTART = "configs/quickstart.yaml"
ALL_SHAPES = SHAPES | GPU_SHAPES
RANDOM = ("workflow=benchmarks.async.long_answers:answer_at_length", "eval.num_tasks=0", "trainer.learning_rate=1e-7")
ROOM = ("engine.max_context_tokens=1024", "rollout.timeout_s=300")
SHOWN = (
    *(f"seconds/trainer/{what}" for what in ("waiting_for_rollouts", "training", "pushing")),
    *(f"push/{what}_s" for what in ("send", "stall", "pause", "transfer", "resume")),
    *(f"tokens_per_s/{what}" for what in ("generated", "trained")),
    *(f"trainer/logp_diff_{what}" for what in ("mean", "max", "fresh_max")),
    *(f"rollouts/{what}" for what in ("seconds", "spanning")),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu/training.py", description="A run on one device.")
    parser.add_argument("--shape", choices=tuple(ALL_SHAPES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    folder, device = Path(tempfile.mkdtemp(prefix="run-")), args.device
    run = folder / "run"
    overrides = [f"run_dir={run}", f"engine.device={device}", f"trainer.device={device}", "observe.progress=plain"]
    if args.shape is not None:
        build(args.shape, folder / "model", torch.device(device))
        overrides += [f"model={folder / 'model'}", *RANDOM, *ROOM]
    overrides += args.overrides
    command = [*ENDING_WITH_US, sys.executable, "-m", "areal_agent.train", "--config", QUICKSTART, *overrides]
    code, peak_bytes = watched(command)
    metrics = run / "metrics.jsonl"
    rows = [numbers_of(row) for row in step_rows(read_metrics(metrics) if metrics.is_file() else [])]
    if len(rows) < 2:
        return code or 1  # it has said why
    print("\n| metric | first step | median of the others |\n|---|---|---|")
    for name in SHOWN:
        if len(values := [row[name] for row in rows if name in row]) > 1:
            print(f"| {name} | {values[0]:.4g} | {statistics.median(values[1:]):.4g} |")
    shape = ModelShape.read((folder if args.shape else run) / "model")
    positions = [row["trainer/num_input_tokens"] - row["trainer/shared_positions"] for row in rows]
    batches = [row["trainer/num_micro_batches"] for row in rows]
    tokens = max(math.ceil(one / number) for one, number in zip(positions, batches, strict=True))
    overrides += [f"trainer.tokens_per_micro_batch={tokens}"]  # those that there were, not those that were allowed
    report_memory(shape, Config.load(QUICKSTART, overrides), rows[-1], peak_bytes)
    if not code:
        summary = json.loads((run / "summary.json").read_text())
        print("\nsuccess before and after:", summary["success_before"], summary["success_after"])
    return code


def build(shape: str, folder: Path, device: torch.device) -> None:
    """Save a random model with a tokenizer that has a token for each of its ids."""
    numbers = ALL_SHAPES[shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    build_weights(numbers, folder, device=device, dtype=dtype)
    train_tokenizer((f"{n} + {n} = {2 * n}" for n in range(100)), vocab_size=300).save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    known: dict[str, int] = tokenizer["model"]["vocab"]
    ids = {*known.values(), *(one["id"] for one in tokenizer["added_tokens"])}
    known |= {f"w{number}": number for number in range(numbers.vocabulary) if number not in ids}
    path.write_text(json.dumps(tokenizer))


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
