"""What staleness costs and gains: final success and throughput of the quickstart, by bound and by objective.

    python benchmarks/staleness --out DIR [--staleness 0 1 4 16] [--objectives naive decoupled] [--seeds 0 1 2]
                                [--limit-s 180] [key=value ...]

`naive` clips the ratio to the behaviour policy (`algorithm.proximal=behavior`); `decoupled` clips around the policy at
the start of the step and weighs by the rest (`recompute`). Each run is `python -m areal_agent.train` in a process of
its own; one that takes longer than the limit is interrupted, counts with the steps that it did, and is marked. Runs
that are in DIR already are not repeated, so that the whole can be done in pieces. Writes DIR/staleness.png and prints a
table.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PROXIMAL = {"naive": "behavior", "decoupled": "recompute"}
COLOURS = {"naive": "#e07a5f", "decoupled": "#2a6f97"}
QUICKSTART = ("--config", "configs/quickstart.yaml", "observe.progress=none")
WIND_UP_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of the grid."""

    objective: str
    staleness: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}-s{self.staleness}-seed{self.seed}"


def main() -> int:
    args = _parse()
    out: Path = args.out.resolve()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    trials = [
        Trial(objective=objective, staleness=staleness, seed=seed)
        for seed in args.seeds  # a grid that is cut short has whole seeds
        for staleness in args.staleness
        for objective in args.objectives
    ]
    results: dict[Trial, dict[str, Any]] = {}
    for number, trial in enumerate(trials, start=1):
        found = finished(out / trial.name)
        results[trial] = found or run(trial, out, args.limit_s, args.overrides)
        state = "found" if found else results[trial]["status"]
        print(f"{number}/{len(trials)} {trial.name}: {state}, {results[trial]['success_after']}", flush=True)
    print_table(results)
    draw(results, out / "staleness.png")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/staleness", description="What staleness costs and gains.")
    parser.add_argument("--out", type=Path, required=True, help="where the run folders are, and those to come")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--objectives", nargs="+", choices=list(PROXIMAL), default=list(PROXIMAL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit-s", type=float, default=180.0, help="of one run, its evaluations included")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


def finished(folder: Path) -> dict[str, Any] | None:
    """What a run in `folder` came to; None when there is none, or not to its end: then the folder is removed."""
    result = folder / "result.json"
    if result.is_file():
        return json.loads(result.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    return None


def run(trial: Trial, out: Path, limit_s: float, overrides: list[str]) -> dict[str, Any]:
    """One run to its end or its limit. What it came to is kept in its folder."""
    folder = out / trial.name
    train(
        [
            f"model={model_of(trial.seed, out)}",
            f"run_dir={folder}",
            f"seed={trial.seed}",
            f"max_staleness={trial.staleness}",
            f"algorithm.proximal={PROXIMAL[trial.objective]}",
            *overrides,
        ],
        limit_s,
    )
    if not (folder / "summary.json").is_file():
        raise SystemExit(f"{trial.name} did not begin to train within {limit_s:g} s, or failed: see {folder / 'logs'}")
    result = json.loads((folder / "summary.json").read_text())
    if result["success_after"] is None:
        result["success_after"] = evaluate(trial, folder, result["checkpoint"], overrides)
    (folder / "result.json").write_text(json.dumps(result))
    return result


def model_of(seed: int, out: Path) -> Path:
    """The tiny model of a seed: built once for all runs, and in no run's time."""
    folder = out / "models" / f"seed{seed}"
    if not folder.is_dir():
        with start(["areal_agent.models.tiny", "--out", str(folder), "--seed", str(seed), "--threads", "1"]) as process:
            if process.wait():
                raise SystemExit(f"the tiny model of seed {seed} could not be built")
    return folder


def train(overrides: list[str], limit_s: float) -> None:
    """The quickstart; at the limit it is asked to end, and saves a checkpoint."""
    with start(["areal_agent.train", *QUICKSTART, *overrides]) as process:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(WIND_UP_S)
        finally:
            process.kill()


def evaluate(trial: Trial, folder: Path, checkpoint: str, overrides: list[str]) -> float:
    """The success of a run that was cut short: graded as `train` would have."""
    graded = folder.with_name(f"{folder.name}-eval")
    shutil.rmtree(graded, ignore_errors=True)
    settings = [f"model={checkpoint}", f"run_dir={graded}", f"seed={trial.seed}"]
    with start(["areal_agent.eval", *QUICKSTART, *settings, *overrides]) as process:
        process.wait()
    return json.loads((graded / "summary.json").read_text())["success"]


def start(module: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", *module], cwd=ROOT, stdout=subprocess.DEVNULL)


def success(result: dict[str, Any]) -> float:
    """Of the weights at the end, on the held-out tasks."""
    return result["success_after"]


def throughput(result: dict[str, Any]) -> float:
    """Trained tokens a second of the loop: without starting and evaluating."""
    trainer = result["seconds"]["trainer"]
    loop_s = sum(seconds for name, seconds in trainer.items() if name not in ("starting", "evaluating", "other"))
    return result["trained_tokens"] / max(loop_s, 1e-9)


def grid(results: dict[Trial, dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The results of all seeds by objective and staleness."""
    by_cell: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for trial, result in results.items():
        by_cell.setdefault((trial.objective, trial.staleness), []).append(result)
    return by_cell


def print_table(results: dict[Trial, dict[str, Any]]) -> None:
    columns = ("objective", "max_staleness", "success, by seed", "mean", "tokens/s", "staleness seen", "cut short")
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for (objective, staleness), of_cell in sorted(grid(results).items()):
        successes = [success(one) for one in of_cell]
        cells = [
            objective,
            str(staleness),
            ", ".join(f"{one:.3f}" for one in successes),
            f"{statistics.fmean(successes):.3f}",
        ]
        cells += [f"{statistics.fmean(map(throughput, of_cell)):.0f}"]
        cells += [str(max(one["max_staleness_seen"] for one in of_cell))]
        cells += [str(sum(one["status"] != "completed" for one in of_cell))]
        print("| " + " | ".join(cells) + " |")


def draw(results: dict[Trial, dict[str, Any]], path: Path) -> None:
    """Success above, throughput below, over the bound; a dot a seed, a line through the means."""
    figure = Figure(figsize=(7.0, 6.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    success_axes, rate_axes = figure.subplots(2, 1, sharex=True)
    by_cell = grid(results)
    bounds = sorted({staleness for _, staleness in by_cell})
    places = {staleness: place for place, staleness in enumerate(bounds)}
    for objective in dict.fromkeys(objective for objective, _ in by_cell):
        for axes, value in ((success_axes, success), (rate_axes, throughput)):
            cells = [(places[bound], [value(one) for one in by_cell.get((objective, bound), [])]) for bound in bounds]
            means = [(place, statistics.fmean(values)) for place, values in cells if values]
            axes.plot(*zip(*means, strict=True), color=COLOURS[objective], label=objective)
            dots = [(place, value) for place, values in cells for value in values]
            axes.plot(*zip(*dots, strict=True), "o", color=COLOURS[objective], alpha=0.4, markeredgewidth=0)
    success_axes.set_ylim(-0.03, 1.03)
    success_axes.set_ylabel("success after training")
    success_axes.legend(frameon=False)
    rate_axes.set_ylim(0, 1.1 * max(map(throughput, results.values())))
    rate_axes.set_ylabel("trained tokens/s")
    rate_axes.set_xlabel("max_staleness")
    rate_axes.set_xticks(list(places.values()), [str(bound) for bound in bounds])
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
