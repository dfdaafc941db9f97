"""The planner against measured runs: calibrated from one, how far is it off on three with tool waits that it never saw?

    python benchmarks/async/planned.py [--steps 12] [--out DIR]

All runs are the quickstart's task with its tiny model, 8 x 8 rollouts a step. The run to calibrate from waits 1 s
before each program, at `max_staleness=4`. Predicted are long-tailed waits (see `slow_tools.py`), synchronous and
asynchronous, and exponential waits of 3 s at `max_staleness=1`: the known second is taken out of the recorded waits,
and the new ones are added. Compared is the time from the first call for a batch to the last push. With `--out` runs
that are there already are not repeated. Nothing else may run on the machine: other work slows the runs unequally.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from slow_tools import Latency, long_tailed, workflow_with

from areal_agent.config import Config
from areal_agent.plan.calibration import layout_of, of_run
from areal_agent.plan.simulation import Costs, Turn, simulate
from areal_agent.run import Run

ROOT = Path(__file__).parents[2]
KNOWN_S = 1.0
SEEDS = range(5)
SECONDS = "seconds.txt"


@dataclass(frozen=True, slots=True)
class Case:
    """A run's tool waits and staleness bound."""

    latency: Latency
    max_staleness: int

    def config(self, run_dir: Path, steps: int) -> Config:
        settings = ["eval.num_tasks=0", "rollout.max_concurrent=128", f"max_staleness={self.max_staleness}"]
        return Config.load(ROOT / "configs" / "quickstart.yaml", [*settings, f"steps={steps}", f"run_dir={run_dir}"])


KNOWN = Case(lambda _: KNOWN_S, 4)
CASES = {
    "long-tailed, synchronous": Case(long_tailed, 0),
    "long-tailed, max_staleness 4": Case(long_tailed, 4),
    "exponential, max_staleness 1": Case(lambda generator: generator.expovariate(1 / 3.0), 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/async/planned.py", description="Planned against measured.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = (args.out or Path(scratch)).resolve()
        seconds = {
            name: measured(case, out / f"run-{number}", args.steps) for number, (name, case) in enumerate(cases())
        }
        calibration = of_run(out / "run-0", KNOWN.config(out / "run-0", args.steps))
    print("\n".join(calibration.told))
    print("| run | measured s | planned s | off by |\n|---|---|---|---|")
    for name, case in cases():
        costs = with_waits(calibration.costs, case.latency)
        layout = layout_of(case.config(out, args.steps), num_servers=1)
        planned = fmean(simulate(costs, layout, args.steps, seed).ends[-1] for seed in SEEDS)
        print(f"| {name} | {seconds[name]:.1f} | {planned:.1f} | {planned / seconds[name] - 1:+.0%} |", flush=True)
    return 0


def cases() -> list[tuple[str, Case]]:
    return [("1 s, max_staleness 4 (calibrated)", KNOWN), *CASES.items()]


def measured(case: Case, folder: Path, steps: int) -> float:
    """Run the loop once, unless `folder` has it; return its seconds."""
    path = folder / SECONDS
    if not path.is_file():
        seconds = asyncio.run(loop(case, folder, steps))
        path.write_text(str(seconds))
        print(f"{folder}: {seconds:.1f} s at a load of {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return float(path.read_text())


async def loop(case: Case, folder: Path, steps: int) -> float:
    async with Run(case.config(folder, steps), workflow=workflow_with(case.latency)) as run:
        started_s = time.perf_counter()
        while run.step < steps:
            await run.train_step(await run.prepare_batch())
            await run.push()
        seconds = time.perf_counter() - started_s
        await run.stop_producing()
        await run.settle(is_completed=True)
    return seconds


def with_waits(costs: Costs, latency: Latency) -> Costs:
    """Replace the known second between turns by draws. Each recorded group is drawn anew eight times."""
    generator = random.Random(1)

    def new(turn: Turn) -> Turn:
        return replace(turn, wait_s=max(0.0, turn.wait_s - KNOWN_S) + latency(generator))

    groups = [
        [[episode[0], *map(new, episode[1:-1]), episode[-1]] for episode in group]
        for _ in range(8)
        for group in costs.groups
    ]
    return replace(costs, groups=groups)


if __name__ == "__main__":
    sys.exit(main())
