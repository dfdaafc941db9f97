"""Asynchronous against synchronous training: the time to the same number of trained trajectories, same code and task.

    python benchmarks/async [--steps 20] [--repeats 1] [--workloads tools none] [--out DIR] [key=value ...]

The task is the quickstart's with its tiny model, 8 x 8 rollouts a step. In the workload `tools` each program takes a
long-tailed time (`slow_tools.py` states it); in `none` it takes its own. Modes: `synchronous` (max_staleness 0),
`asynchronous` (max_staleness 4, pushes interrupt answers), and the same with pushes that wait for turns to end. The
time runs from the first call for a batch to the last push; starting the processes is not in it, nor an evaluation.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from slow_tools import Latency, long_tailed, no_latency, workflow_with

from areal_agent.config import Config
from areal_agent.observe.metrics import read_metrics
from areal_agent.observe.rows import Spent, step_rows
from areal_agent.run import Run

ROOT = Path(__file__).parents[2]
WORKLOADS: dict[str, Latency] = {"tools": long_tailed, "none": no_latency}
MODES = {
    "synchronous": ("max_staleness=0",),
    "asynchronous": ("max_staleness=4", "engine.on_push=interrupt"),
    "asynchronous, no interruption": ("max_staleness=4", "engine.on_push=turn_boundary"),
}
BASE = ("eval.num_tasks=0", "rollout.max_concurrent=128", "engine.max_running_requests=64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run: the seconds of its loop, and what was done in them."""

    seconds: float
    trajectories: int
    tokens: int
    engine_busy: float
    trainer_busy: float
    staleness: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/async", description="Asynchronous against synchronous.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each mode, in turns; their medians are compared"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    columns = (
        "workload",
        "mode",
        "s",
        "speed-up",
        "trajectories",
        "tokens/s",
        "engine busy",
        "trainer busy",
        "staleness",
    )
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        for workload in args.workloads:
            compare(workload, args.steps, args.repeats, out, args.overrides)
    return 0


def compare(workload: str, steps: int, repeats: int, out: Path, overrides: list[str]) -> None:
    """All modes in turns, so that what else the machine does falls on all alike; prints a row a mode."""
    results: dict[str, list[Result]] = {mode: [] for mode in MODES}
    for number in range(repeats):
        for mode, settings in MODES.items():
            run_dir = out / f"{workload}-{mode.replace(', ', '-').replace(' ', '-')}-{number}"
            config = Config.load(
                ROOT / "configs" / "quickstart.yaml",
                [*BASE, *settings, f"seed={number}", f"steps={steps}", f"run_dir={run_dir}", *overrides],
            )
            result = asyncio.run(measure(config, WORKLOADS[workload]))
            results[mode].append(result)
            print(f"{workload}, {mode}, run {number}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    baseline_s = statistics.median(one.seconds for one in results["synchronous"])
    for mode, of_mode in results.items():
        seconds = statistics.median(one.seconds for one in of_mode)
        tokens = statistics.median(one.tokens / one.seconds for one in of_mode)
        cells = [workload, mode, f"{seconds:.1f}", f"{baseline_s / seconds:.2f}", str(of_mode[0].trajectories)]
        cells += [
            f"{tokens:.0f}",
            *(f"{mean(of_mode, name):.2f}" for name in ("engine_busy", "trainer_busy", "staleness")),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


async def measure(config: Config, latency: Latency) -> Result:
    """One run of the loop that `areal_agent.train` is."""
    run = Run(config, workflow=workflow_with(latency))
    async with run:
        started_s = time.perf_counter()
        while run.step < config.steps:
            await run.train_step(await run.prepare_batch())
            await run.push()
        seconds = time.perf_counter() - started_s
        await run.stop_producing()
        await run.settle(is_completed=True)
    rows = step_rows(read_metrics(run.folder.metrics))
    spent = Spent.of(rows)
    return Result(
        seconds=seconds,
        trajectories=sum(row["rollouts/trained"] for row in rows),
        tokens=sum(row["tokens/trained"] for row in rows),
        engine_busy=spent.share(spent.engine["generating"]),
        trainer_busy=spent.share(spent.trainer["training"]),
        staleness=statistics.fmean(row["staleness/mean"] for row in rows),
    )


def mean(results: list[Result], name: str) -> float:
    return statistics.fmean(getattr(one, name) for one in results)


if __name__ == "__main__":
    sys.exit(main())
