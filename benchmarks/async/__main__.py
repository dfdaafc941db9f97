"""Asynchronous against synchronous training, and interruption against waiting: same code, tasks and seeds in all modes.

    python benchmarks/async [key=value ...] [--steps 20] [--repeats 1] [--workloads tools none] [--out DIR]
    python benchmarks/async --workloads long --steps 20 --repeats 3

The task is the quickstart's with its tiny model, 8 x 8 rollouts per step. In the workload `tools` each program takes a
long-tailed time (see `slow_tools.py`); in `none` it takes its own. Modes: `synchronous` (max_staleness 0),
`asynchronous` (max_staleness 4, pushes interrupt answers), and the same with pushes that wait for turns to end. The
time runs from the first call for a batch to the last push, without the start of processes and without evaluation. It
includes the first step, in which nothing can overlap yet; the column beside leaves that out. `ideal` is what overlap
alone could bring with these waits (`ideal.py`), computed from the times of engine and trainer in the synchronous runs.

In the workload `long`, answers have a long tail of up to 400 tokens (`long_answers.py`) and no tools. All modes are
asynchronous (max_staleness 4) and differ in what a push does to answers in progress (engine.on_push): it interrupts
them, or waits for them (`no interruption`), or waits for whole rollouts, before which none begins (`draining`). Trained
tokens per second are those after the first step, whose weights are the first and interrupt nothing; the ratio to `no
interruption` is the median of the ratios by seed. The learning rate is next to nothing, so all modes train one model.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ideal import Work, ideal_s
from long_answers import answer_at_length
from slow_tools import Latency, long_tailed, no_latency, workflow_with

from areal_agent import Rollout
from areal_agent.config import Config
from areal_agent.observe.metrics import Spent, read_metrics, step_rows
from areal_agent.run import Run

ROOT = Path(__file__).parents[2]
WAITS: dict[str, Latency] = {"tools": long_tailed, "none": no_latency}
MODES = {
    "synchronous": ("max_staleness=0",),
    "asynchronous": ("max_staleness=4", "engine.on_push=interrupt"),
    "asynchronous, no interruption": ("max_staleness=4", "engine.on_push=turn_boundary"),
}
UNINTERRUPTED = "no interruption"
PUSHES = {
    "interruption": ("max_staleness=4", "engine.on_push=interrupt"),
    UNINTERRUPTED: ("max_staleness=4", "engine.on_push=turn_boundary"),
    "draining": ("max_staleness=4", "engine.on_push=drain"),
}
BASE = ("eval.num_tasks=0", "rollout.max_concurrent=128", "engine.max_running_requests=64")
LONG = ("engine.max_context_tokens=1024", "rollout.timeout_s=600", "trainer.learning_rate=1e-9")
LONG_COLUMNS = (
    "workload",
    "mode",
    "tokens/s by seed",
    "median",
    "ratio",
    "s",
    "interrupted",
    "engine busy",
    "staleness",
)
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
    later_tokens: int  # trained after the first step
    interrupted: int  # completions with tokens of several versions

    @property
    def later_s(self) -> float:
        return self.seconds - self.first_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def later_tokens_per_s(self) -> float:
        return self.later_tokens / max(self.later_s, 1e-9)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/async", description="Asynchronous against synchronous.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each mode, in turns; their medians are compared"
    )
    parser.add_argument("--workloads", nargs="+", choices=[*WAITS, "long"], default=list(WAITS))
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        for workload in args.workloads:
            is_long = workload == "long"
            columns = LONG_COLUMNS if is_long else COLUMNS
            print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
            results = run_all(workload, args.steps, args.repeats, out, args.overrides)
            report_pushes(results) if is_long else report(workload, results)
    return 0


def run_all(workload: str, steps: int, repeats: int, out: Path, overrides: list[str]) -> dict[str, list[Result]]:
    """Run all modes in turns, so that other load on the machine affects all alike; return each mode's runs by seed."""
    modes = PUSHES if workload == "long" else MODES
    workflow = answer_at_length if workload == "long" else workflow_with(WAITS[workload])
    base = [*BASE, *LONG] if workload == "long" else [*BASE]
    results: dict[str, list[Result]] = {mode: [] for mode in modes}
    for number in range(repeats):
        for mode, settings in modes.items():
            run_dir = out / f"{workload}-{mode.replace(', ', '-').replace(' ', '-')}-{number}"
            config = Config.load(
                ROOT / "configs" / "quickstart.yaml",
                [*base, *settings, f"seed={number}", f"steps={steps}", f"run_dir={run_dir}", *overrides],
            )
            result = asyncio.run(measure(config, workflow))
            results[mode].append(result)
            print(f"{workload}, {mode}, run {number}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return results


def report_pushes(results: dict[str, list[Result]]) -> None:
    """Print a row for each thing that a push may do to answers in progress."""
    for mode, of_mode in results.items():
        rates = [one.later_tokens_per_s for one in of_mode]
        ratios = [
            rate / max(off.later_tokens_per_s, 1e-9) for rate, off in zip(rates, results[UNINTERRUPTED], strict=True)
        ]
        cells = ["long", mode, ", ".join(f"{rate:.0f}" for rate in rates), f"{statistics.median(rates):.0f}"]
        cells += [f"{statistics.median(ratios):.2f}", f"{median(of_mode, 'seconds'):.1f}"]
        cells += [f"{median(of_mode, 'interrupted'):.0f}"]
        cells += [f"{mean(of_mode, name):.2f}" for name in ("engine_busy", "staleness")]
        print("| " + " | ".join(cells) + " |", flush=True)


def report(workload: str, results: dict[str, list[Result]]) -> None:
    """Print a row for each mode, beside the ideal."""
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
    return ideal_s(work, WAITS[workload], steps=config.steps, max_staleness=config.max_staleness)


async def measure(config: Config, workflow: Callable[[dict[str, Any], Rollout], Awaitable[float]]) -> Result:
    """Run the loop of `areal_agent.train` once."""
    run = Run(config, workflow=workflow)
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
        later_tokens=sum(row["tokens/trained"] for row in rows[1:]),
        interrupted=sum(row["rollouts/interrupted_completions"] for row in rows),
    )


def median(results: list[Result], name: str) -> float:
    return statistics.median(getattr(one, name) for one in results)


def mean(results: list[Result], name: str) -> float:
    return statistics.fmean(getattr(one, name) for one in results)


if __name__ == "__main__":
    sys.exit(main())
