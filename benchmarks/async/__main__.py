"""Asynchronous against synchronous training: the time to the same number of trained trajectories, same code and task.

    python benchmarks/async [key=value ...] [--steps 20] [--repeats 1] [--workloads tools none] [--out DIR]

The task is the quickstart's with its tiny model, 8 x 8 rollouts per step. In the workload `tools` each program takes a
long-tailed time (see `slow_tools.py`); in `none` it takes its own. Modes: `synchronous` (max_staleness 0),
`asynchronous` (max_staleness 4, pushes interrupt answers), and the same with pushes that wait for turns to end. The
time runs from the first call for a batch to the last push, without the start of processes and without evaluation. It
includes the first step, in which nothing can overlap yet; the column beside leaves that out. `ideal` is what overlap
alone could bring with these waits (`ideal.py`), computed from the times of engine and trainer in the synchronous runs.
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

from ideal import Work, ideal_s
from slow_tools import Latency, long_tailed, no_latency, workflow_with

from areal_agent.config import Config
from areal_agent.observe.metrics import Spent, read_metrics, step_rows
from areal_agent.run import Run

ROOT = Path(__file__).parents[2]
WORKLOADS: dict[str, Latency] = {"tools": long_tailed, "none": no_latency}
MODES = {
    "synchronous": ("max_staleness=0",),
    "asynchronous": ("max_staleness=4", "engine.on_push=interrupt"),
    "asynchronous, no interruption": ("max_staleness=4", "engine.on_push=turn_boundary"),
}
BASE = ("eval.num_tasks=0", "rollout.max_concurrent=128", "engine.max_running_requests=64")
COLUMNS = (
    "workload",
    "mode",
    "s",
    "speed-up",
    "ideal",
    "s after the first step",
    "speed-up",
    "trajectories",
    "tokens/s",
    "engine busy",
    "trainer busy",
    "staleness",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run: the seconds of its loop, and what was done in them."""

    config: Config
    seconds: float
    first_s: float  # of which the first step
    generating_s: float  # of the engine, per step
    training_s: float  # of the trainer, pushes included, per step
    trajectories: int
    tokens: int
    engine_busy: float
    trainer_busy: float
    staleness: float

    @property
    def later_s(self) -> float:
        return self.seconds - self.first_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


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
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        for workload in args.workloads:
            compare(workload, args.steps, args.repeats, out, args.overrides)
    return 0


def compare(workload: str, steps: int, repeats: int, out: Path, overrides: list[str]) -> None:
    """Run all modes in turns, so that other load on the machine affects all alike, and print a row per mode."""
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
    synchronous = results["synchronous"]
    for mode, of_mode in results.items():
        cells = [workload, mode, f"{median(of_mode, 'seconds'):.1f}"]
        cells += [f"{median(synchronous, 'seconds') / median(of_mode, 'seconds'):.2f}"]
        cells += [f"{ideal(synchronous, synchronous, workload) / ideal(synchronous, of_mode, workload):.2f}"]
        cells += [f"{median(of_mode, 'later_s'):.1f}"]
        cells += [f"{median(synchronous, 'later_s') / max(median(of_mode, 'later_s'), 1e-9):.2f}"]
        cells += [str(of_mode[0].trajectories), f"{median(of_mode, 'tokens_per_s'):.0f}"]
        cells += [f"{mean(of_mode, name):.2f}" for name in ("engine_busy", "trainer_busy", "staleness")]
        print("| " + " | ".join(cells) + " |", flush=True)


def ideal(synchronous: list[Result], of_mode: list[Result], workload: str) -> float:
    """Return the least time of a mode, from what a step took when engine and trainer worked one after the other."""
    config = of_mode[0].config
    work = Work(
        generating_s=median(synchronous, "generating_s"),
        training_s=median(synchronous, "training_s"),
        groups=config.batch_size,
        group_size=config.group_size,
        max_concurrent=config.rollout.max_concurrent,
    )
    return ideal_s(work, WORKLOADS[workload], steps=config.steps, max_staleness=config.max_staleness)


async def measure(config: Config, latency: Latency) -> Result:
    """Run the loop of `areal_agent.train` once."""
    run = Run(config, workflow=workflow_with(latency))
    async with run:
        started_s = time.perf_counter()
        first_s = 0.0
        while run.step < config.steps:
            await run.train_step(await run.prepare_batch())
            await run.push()
            first_s = first_s or time.perf_counter() - started_s
        seconds = time.perf_counter() - started_s
        await run.stop_producing()
        await run.settle(is_completed=True)
    rows = step_rows(read_metrics(run.folder.metrics))
    spent = Spent.of(rows)
    trained_s = spent.trainer["training"] + spent.trainer["pushing"]
    return Result(
        config=config,
        seconds=seconds,
        first_s=first_s,
        generating_s=spent.engine["generating"] / config.steps,
        training_s=trained_s / config.steps,
        trajectories=sum(row["rollouts/trained"] for row in rows),
        tokens=sum(row["tokens/trained"] for row in rows),
        engine_busy=spent.share(spent.engine["generating"]),
        trainer_busy=spent.share(spent.trainer["training"]),
        staleness=statistics.fmean(row["staleness/mean"] for row in rows),
    )


def median(results: list[Result], name: str) -> float:
    return statistics.median(getattr(one, name) for one in results)


def mean(results: list[Result], name: str) -> float:
    return statistics.fmean(getattr(one, name) for one in results)


if __name__ == "__main__":
    sys.exit(main())
