"""Runs the quickstart once a seed, with and without its stable updates and at twice its learning rate, side by side.

    python benchmarks/quickstart_seeds [--steps 150] [--seeds 10] [--tasks 2000] [--arms with without]
                                       [--rates 6e-4 1.2e-3] [--parallel 1] [--results FILE] [--out DIR] [key=value ...]

Two rules of the optimiser keep a run stable: gradients are clipped at a quantile of those before, and a gradient of
zero makes no update. `with` is configs/quickstart.yaml; `without` has neither rule, `unclipped` only the second. The
seed determines the model's initialisation, its demonstrations, the order of tasks, sampling and training. Each finished
run is one JSON line in the results file, and runs that it has are not repeated, so that the benchmark can be stopped
and continued. The target of each run with stable updates: success of at least 0.95 on the held-out tasks, no mean of
ten steps in a row below 0.93 after step 40, and a ledger that verifies.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.process import ENDING_WITH_US

ROOT = Path(__file__).parents[2]
UNCLIPPED = "trainer.gradient_clip_quantile=null"
ARMS = {
    "with": (),
    "without": (UNCLIPPED, "algorithm.entropy_coefficient=1e-12"),  # teaches nothing, but no gradient is zero
    "unclipped": (UNCLIPPED,),
}
MIN_AFTER, MIN_LOWEST = 0.95, 0.93
FIRST, WINDOW = 40, 10


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the quickstart."""

    arm: str
    rate: float
    seed: int
    steps: int
    tasks: int
    overrides: str

    @property
    def name(self) -> str:
        return f"{self.arm}_{self.rate:g}_seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one run."""

    before: float  # success on the held-out tasks
    after: float
    lowest: float | None  # mean success of `WINDOW` steps in a row after step `FIRST`; None for a shorter run
    wall_s: float
    is_verified: bool

    @property
    def is_met(self) -> bool:
        return self.after >= MIN_AFTER and (self.lowest is None or self.lowest >= MIN_LOWEST) and self.is_verified


def main() -> int:
    args = _parse()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    trials = [
        Trial(arm=arm, rate=rate, seed=seed, steps=args.steps, tasks=args.tasks, overrides=" ".join(args.overrides))
        for arm in args.arms
        for rate in args.rates
        for seed in range(args.seeds)
    ]
    results = read_results(args.results)
    missing = [trial for trial in trials if trial not in results]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.parallel) as pool:
        out = (args.out or Path(scratch)).resolve()
        outcomes = pool.map(partial(run_one, out=out, results=args.results), missing)
        results |= dict(zip(missing, outcomes, strict=True))
    print("\n" + table({trial: results[trial] for trial in trials}))
    cured = [results[trial] for trial in trials if trial.arm == "with"]
    num_met = sum(outcome.is_met for outcome in cured)
    print(f"\n{num_met} of {len(cured)} runs with stable updates met the target")
    return 0 if num_met == len(cured) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/quickstart_seeds", description="The quickstart, once a seed, side by side."
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=10, help="how many: 0, 1, ...")
    parser.add_argument("--tasks", type=int, default=2000, help="held-out tasks, before and after training")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["with", "without"])
    parser.add_argument("--rates", nargs="+", type=float, default=[6e-4, 1.2e-3], help="learning rates")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; each wants two cores")
    parser.add_argument("--results", type=Path, help="the file of finished runs, which are not repeated")
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


def read_results(file: Path | None) -> dict[Trial, Outcome]:
    """Return the finished runs of the results file; none if there is no such file."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {Trial(**row["trial"]): Outcome(**row["outcome"]) for row in rows}


def run_one(trial: Trial, *, out: Path, results: Path | None) -> Outcome:
    """Train and verify in processes of their own, and print and write the row. Raises RuntimeError if a run fails."""
    run_dir, cache = out / trial.name, out / f"model{trial.seed}"  # all runs of a seed begin with one model
    settings = {
        "seed": trial.seed,
        "steps": trial.steps,
        "eval.num_tasks": trial.tasks,
        "eval.tasks.source": "envs.calculator.tasks:load",
        "eval.tasks.args.num": trial.tasks,  # by default the quickstart has a thousand
        "trainer.learning_rate": trial.rate,
        "run_dir": run_dir,
        "observe.progress": "none",
    }
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *ARMS[trial.arm], *trial.overrides.split()]
    command = ["areal_agent.train", "--config", "configs/quickstart.yaml", *overrides]
    if run(command, AREAL_AGENT_CACHE=str(cache)) != 0:
        raise RuntimeError(f"the run {trial.name} failed; --out DIR keeps its folder with its logs")
    summary = json.loads((run_dir / "summary.json").read_text())
    successes = [row["reward/success"] for row in step_rows(read_metrics(run_dir / "metrics.jsonl"))]
    outcome = Outcome(
        before=summary["success_before"],
        after=summary["success_after"],
        lowest=lowest(successes),
        wall_s=summary["wall_s"],
        is_verified=run(["areal_agent.ledger", "verify", str(run_dir)]) == 0,
    )
    print(trial.name, outcome, flush=True)
    if results is not None:
        with results.open("a") as file:
            file.write(json.dumps({"trial": asdict(trial), "outcome": asdict(outcome)}) + "\n")
    return outcome


def run(module: list[str], **environment: str) -> int:
    done = subprocess.run(
        [*ENDING_WITH_US, sys.executable, "-m", *module],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode


def lowest(successes: Sequence[float]) -> float | None:
    """Return the lowest mean of `WINDOW` steps in a row after step `FIRST`; None if there are too few."""
    late = successes[FIRST:]
    means = [statistics.fmean(late[start : start + WINDOW]) for start in range(len(late) - WINDOW + 1)]
    return round(min(means), 4) if means else None


def table(results: dict[Trial, Outcome]) -> str:
    """Lay out the runs side by side: a line for each seed, a column for each arm and learning rate."""
    columns = list(dict.fromkeys((trial.arm, trial.rate) for trial in results))
    lines = [
        "Success on held-out tasks after training, and the lowest mean of ten steps in a row after step 40:",
        "",
        "| seed | " + " | ".join(f"{arm}, {rate:g}" for arm, rate in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for seed in dict.fromkeys(trial.seed for trial in results):
        cells = {(trial.arm, trial.rate): outcome for trial, outcome in results.items() if trial.seed == seed}
        lines.append(f"| {seed} | " + " | ".join(f"{cells[one].after}, {cells[one].lowest}" for one in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
