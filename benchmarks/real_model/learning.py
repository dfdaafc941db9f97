"""Runs of ours and of TRL's GRPOTrainer on the same tasks and cores, each in processes of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from areal_agent.config import Config
from areal_agent.observe.metrics import evaluation_rows, read_metrics, step_rows
from areal_agent.process import ENDING_WITH_US
from envs.reasoning_gym.tasks import load

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of one side. TRL's settings are read from the config, too."""

    side: str
    cores: int
    seed: int
    overrides: str

    @property
    def config(self) -> Config:
        return Config.load(HERE / "sums.yaml", [f"seed={self.seed}", *self.overrides.split()])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one run."""

    steps_s: Sequence[float]
    points: Sequence[tuple[int, float, float]]  # step, seconds of all steps up to it, success of held-out tasks
    peak_bytes: Mapping[str, int]  # resident, by process
    micro_batch: int = 0  # tokens of ours that went through the model at once


Results = Mapping[Trial, Outcome]


def run_all(trials: Iterable[Trial], file: Path, trl_python: str) -> Results:
    """Return the outcomes. Runs that the file has are not repeated. Raises CalledProcessError when one fails."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    results = {Trial(**row["trial"]): Outcome(**row["outcome"]) for row in rows}
    for trial in trials:
        if trial not in results:
            results[trial] = outcome = run_ours(trial) if trial.side == "ours" else run_theirs(trial, trl_python)
            with file.open("a") as lines:
                lines.write(json.dumps({"trial": asdict(trial), "outcome": asdict(outcome)}) + "\n")
        print(f"{trial.side}, seed {trial.seed}: {median(results[trial].steps_s):.1f} s a step", flush=True)
    return {trial: results[trial] for trial in trials}


def run_ours(trial: Trial) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), Path(name) / "config.yaml"
        config.write_text(trial.config.to_yaml())
        command = ["-m", "areal_agent.train", "--config", str(config), f"run_dir={folder / 'run'}"]
        run(trial.cores, [sys.executable, *command, "observe.progress=none"])
        rows = read_metrics(folder / "run" / "metrics.jsonl")
    steps = step_rows(rows)
    steps_s = [row["seconds/wall"] for row in steps]
    points = [(row["step"], sum(steps_s[: row["step"]]), row["eval/success"]) for row in evaluation_rows(rows)]
    peaks = {name: steps[-1][f"memory/{name}_peak_bytes"] for name in ("main", "engine", "trainer")}
    positions = [row["trainer/num_input_tokens"] - row["trainer/shared_positions"] for row in steps]
    tokens = max(ceil(one / row["trainer/num_micro_batches"]) for one, row in zip(positions, steps, strict=True))
    return Outcome(steps_s=steps_s, points=sorted(points), peak_bytes=peaks, micro_batch=tokens)


def run_theirs(trial: Trial, python: str) -> Outcome:
    config = trial.config
    args: dict[str, Any] = config.tasks.args if config.tasks else {}
    tasks, held_out = (load(split, trial.seed, **args) for split in ("train", "test"))
    return train_by_trl(config, tasks, held_out, python, trial.cores)


def train_by_trl(
    config: Config,
    tasks: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
    python: str,
    num_cores: int,
    device: str = "cpu",
) -> Outcome:
    """Train with the settings of a config and TRL's own trainer. Raises CalledProcessError when that fails."""
    given = config.model_dump(include={"model", "seed", "steps", "batch_size", "group_size"}) | {
        "dtype": config.trainer.dtype,
        "learning_rate": config.trainer.learning_rate,
        "max_tokens": config.rollout.max_tokens,
        "eval_every": config.eval.every,
        "tasks": tasks,
        "held_out": held_out[: config.eval.num_tasks],
        "device": device,
    }
    said = run(num_cores, [python, str(HERE / "theirs.py")], json.dumps(given))
    return Outcome(**json.loads(said.splitlines()[-1]))


def run(num_cores: int, command: Sequence[str], given: str = "") -> str:
    """Run a command on so many cores, with as many threads where it does not set them; return what it prints."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:num_cores]))
    command = [*ENDING_WITH_US, "taskset", "-c", cores, *command]
    settings = os.environ | {"OMP_NUM_THREADS": str(num_cores)}
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=settings, input=given, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def table(results: Results) -> str:
    """Lay out the seconds of a step, and the held-out success after a step and so many seconds: medians over seeds."""
    steps = sorted({step for outcome in results.values() for step, *_ in outcome.points})
    columns = ["side", "s a step", "to ours", *(f"success at step {step}" for step in steps)]
    lines, ours_s = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"], 0.0
    for side in dict.fromkeys(trial.side for trial in results):
        outcomes = [outcome for trial, outcome in results.items() if trial.side == side]
        step_s = median(seconds for outcome in outcomes for seconds in outcome.steps_s[1:] or outcome.steps_s)
        ours_s = ours_s or step_s
        cells = [side, f"{step_s:.2f}", f"{step_s / ours_s:.2f}"]
        for step in steps:
            _, seconds, successes = zip(*(one for out in outcomes for one in out.points if one[0] == step), strict=True)
            cells.append(f"{median(successes):.2f} ({median(seconds):.0f} s)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """Plot held-out success over the seconds of training, a line for each run."""
    figure = Figure(figsize=(7.0, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for trial, outcome in results.items():
        _, seconds, successes = zip(*outcome.points, strict=True)
        colour, label = "#2a6f97" if trial.side == "ours" else "#e07a5f", None if trial.seed else trial.side
        axes.plot(seconds, successes, "o-", color=colour, alpha=0.7, label=label)
    axes.set(ylim=(-0.03, 1.03), xlabel="seconds of training", ylabel="success of held-out tasks")
    axes.legend(frameon=False)
    figure.savefig(path)
