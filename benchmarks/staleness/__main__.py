"""The costs and gains of staleness: final success and throughput of the quickstart, by bound and by objective.

    python benchmarks/staleness --out DIR [key=value ...] [--staleness 0 1 4 16] [--objectives naive decoupled]
                                [--seeds 0 1 2] [--limit-s 150] [--config configs/quickstart.yaml]

`naive` clips the ratio to the behaviour policy (`algorithm.proximal=behavior`); `decoupled` clips around the policy at
the start of the step and weighs by the rest (`recompute`). All runs of a seed begin with the same model, and train 30
steps of 8 x 8 rollouts, each as old as the bound allows (how and why: `held_run.py`). A run over the time limit is cut
short, graded as it is, and marked; one that fails is counted, and the grid goes on. Results in DIR are not repeated,
except failures, so that the grid can be done in pieces. After every run DIR/staleness.png and DIR/table.md are written.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from chart import Trial, draw, table
from held_run import Outcome, measure

from areal_agent.config import Config
from areal_agent.errors import ArealAgentError

ROOT = Path(__file__).parents[2]
PROXIMAL = {"naive": "behavior", "decoupled": "recompute"}
BASE = ("steps=30", "trainer.checkpoint_every=1000", "observe.progress=none")
OUTCOME = "outcome.json"


def main() -> int:
    args = _parse()
    out: Path = args.out.resolve()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    trials = [
        Trial(objective=objective, staleness=staleness, seed=seed)
        for seed in args.seeds  # so that a grid that is cut short has whole seeds
        for staleness in args.staleness
        for objective in args.objectives
    ]
    results: dict[Trial, Outcome | None] = {
        trial: outcome for trial in trials if (outcome := found(out / trial.name)) is not None
    }
    missing = [trial for trial in trials if trial not in results]
    print(f"{len(results)} of {len(trials)} runs are in {out} already", flush=True)
    started_s = time.monotonic()
    for number, trial in enumerate(missing, start=1):
        outcome = results[trial] = one_run(trial, out, args.config, args.limit_s, args.overrides)
        left_s = (time.monotonic() - started_s) / number * (len(missing) - number)
        told = "failed" if outcome is None else f"success {outcome.success:.3f}, {outcome.wall_s:.0f} s"
        print(f"{number}/{len(missing)} {trial.name}: {told}; about {left_s / 60:.0f} minutes to go", flush=True)
        in_order = {one: results[one] for one in trials if one in results}
        draw(in_order, out / "staleness.png")
        (out / "table.md").write_text(table(in_order) + "\n")
    print("\n" + table({trial: results[trial] for trial in trials}))
    return 1 if None in results.values() else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/staleness", description="What staleness costs and gains.")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run folders")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--objectives", nargs="+", choices=list(PROXIMAL), default=list(PROXIMAL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit-s", type=float, default=150.0, help="of one run's training; grading comes on top")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


def found(folder: Path) -> Outcome | None:
    """Read the outcome of a run in `folder`; None when there is none, or it did not end."""
    file = folder / OUTCOME
    return Outcome(**json.loads(file.read_text())) if file.is_file() else None


def one_run(trial: Trial, out: Path, file: Path, limit_s: float, overrides: list[str]) -> Outcome | None:
    """Make one run, in place of an earlier one that did not end. Return None when it fails."""
    folder = out / trial.name
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        f"run_dir={folder}",
        f"seed={trial.seed}",
        f"max_staleness={trial.staleness}",
        f"algorithm.proximal={PROXIMAL[trial.objective]}",
    ]
    config = Config.load(file, [*BASE, *settings, *overrides])
    if config.model == "tiny":
        config = config.model_copy(update={"model": str(model_of(trial.seed, out))})
    try:
        outcome = asyncio.run(measure(config, limit_s))
    except ArealAgentError as error:
        print(f"{trial.name} failed: {error}", file=sys.stderr, flush=True)
        return None
    (folder / OUTCOME).write_text(json.dumps(asdict(outcome)))
    return outcome


def model_of(seed: int, out: Path) -> Path:
    """Return the tiny model of a seed, built once for all runs and outside their time."""
    folder = out / "models" / f"seed{seed}"
    if not folder.is_dir():
        build = ["areal_agent.models.tiny", "--out", str(folder), "--seed", str(seed), "--threads", "1"]
        subprocess.run([sys.executable, "-m", *build], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
