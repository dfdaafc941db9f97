"""Makes the runs of recipes.yaml anew, and writes docs/recipes.md and its picture from them.

    python benchmarks/recipes [NAME ...] [--model FOLDER]

Each recipe's commands run one after the other, as a reader of the page would type them. A run that is completed is not
repeated, so the whole can be stopped and continued: it takes some two hours on two cores. What is shown of a run
is kept in results.json, so the page can be written without the others' folders. `--model` is a folder with
SmolLM2-135M-Instruct for where the hub is out of reach. Extras: `reasoning-gym`, `textarena`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from areal_agent.observe.curve import AFTER, REWARD, RUNNING_MEAN_STEPS, SHARE_LIMITS, running_mean
from areal_agent.observe.metrics import evaluation_rows, read_metrics, step_rows
from areal_agent.process import ENDING_WITH_US
from areal_agent.run.scores import Estimate

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULTS, PAGE, PICTURE = HERE / "results.json", ROOT / "docs" / "recipes.md", ROOT / "docs" / "recipes.png"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
COLUMNS = 3
HEAD = f"""# Recipes

What learns, how far, and in how long: commands that were run as they stand here, and what came of them. The curves are
of one seed, so read a difference of a few hundredths as noise; the intervals (95%) are those of the held-out tasks
alone. "Before" is before the last command. The minutes are of all commands, on two cores of an AMD EPYC (AVX2, float32)
that other programs used as well, and a quiet machine needs fewer. `tiny` is a model of a million parameters, built and
warm-started at its first use; {HUB} is a real one, read from a folder (`model=`), for
the hub was out of reach. `python benchmarks/recipes` makes all of them anew and writes this page.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What is shown of the run at the end of a recipe."""

    date: str
    minutes: float  # of all the recipe's runs
    num_tasks: int  # that are held out
    success: Sequence[tuple[int, float]]  # of them: the step whose weights the evaluation began under, the share
    rewards: Sequence[float]  # the mean of the rollouts of each step
    is_verified: bool

    @classmethod
    def of(cls, runs: Sequence[Path]) -> Self:
        rows = read_metrics(runs[-1] / "metrics.jsonl")
        evaluations = evaluation_rows(rows)
        return cls(
            date=datetime.fromtimestamp((runs[-1] / "summary.json").stat().st_mtime, UTC).date().isoformat(),
            minutes=round(sum(seconds_of(run) for run in runs) / 60, 1),
            num_tasks=int(evaluations[0]["eval/num_tasks"]),
            success=sorted((row["step"], row["eval/success"]) for row in evaluations),
            rewards=[round(row["reward/mean"], 4) for row in step_rows(rows)],
            is_verified=run_command(f"python -m areal_agent.ledger verify {shlex.quote(str(runs[-1]))} > /dev/null"),
        )

    def estimate(self, index: int) -> Estimate:
        """Return the success of one of its evaluations, with its interval."""
        num_right = round(self.success[index][1] * self.num_tasks)
        return Estimate.of_share([1.0] * num_right + [0.0] * (self.num_tasks - num_right))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/recipes", description="Makes the runs of docs/recipes.md, and the page."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the recipes to make; by default all")
    parser.add_argument("--model", type=Path, help=f"a folder in the place of {HUB}")
    args = parser.parse_args()
    recipes = read_recipes()
    if unknown := set(args.names) - set(recipes):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}; there are {', '.join(recipes)}")
    for name in args.names or recipes:
        make(recipes[name], args.model)
        outcome = Outcome.of([ROOT / step["run"] for step in recipes[name]["steps"] if "run" in step])
        RESULTS.write_text(written(read_results() | {name: outcome}))
        write_page(recipes, read_results())
        print(f"{name}: {outcome.estimate(0)} -> {outcome.estimate(-1)} in {outcome.minutes:.0f} minutes", flush=True)
    return 0 if all(outcome.is_verified for outcome in read_results().values()) else 1


def read_recipes() -> dict[str, dict[str, Any]]:
    return {recipe["name"]: recipe for recipe in yaml.safe_load((HERE / "recipes.yaml").read_text())}


def read_results() -> dict[str, Outcome]:
    return {name: Outcome(**row) for name, row in json.loads(RESULTS.read_text()).items()} if RESULTS.exists() else {}


def written(results: Mapping[str, Outcome]) -> str:
    """Return the results as JSON, a recipe a line."""
    rows = (f"{json.dumps(name)}: {json.dumps(asdict(outcome))}" for name, outcome in sorted(results.items()))
    return "{" + ",\n ".join(rows) + "}\n"


def make(recipe: Mapping[str, Any], model: Path | None, root: Path = ROOT) -> None:
    """Run the commands whose run is not completed. Exits when one fails."""
    if is_completed(root / recipe["steps"][-1]["run"]):
        return
    for step in recipe["steps"]:
        if "run" in step and is_completed(root / step["run"]):
            continue
        print(f"$ {step['command']}", flush=True)
        given = f" model={shlex.quote(str(model))}" if model and reads_hub(step["command"]) else ""
        if not run_command(step["command"] + given, root):
            sys.exit(f"{recipe['name']}: the command failed: {step['command']}")


def is_completed(run: Path) -> bool:
    summary = run / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def reads_hub(command: str) -> bool:
    """Return whether a command's config begins with the model of the hub."""
    _, has_config, rest = command.partition("--config ")
    return bool(has_config) and yaml.safe_load((ROOT / rest.split()[0]).read_text())["model"] == HUB


def run_command(command: str, root: Path = ROOT) -> bool:
    """Run a command in `root`, with this Python, and return whether it succeeded."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = [*ENDING_WITH_US, "bash", "-c", command]
    return subprocess.run(shell, cwd=root, env=os.environ | {"PATH": path}, check=False).returncode == 0


def seconds_of(run: Path) -> float:
    """Return the time from the start of a run to its end."""
    return (run / "summary.json").stat().st_mtime - (run / "config.yaml").stat().st_mtime


def write_page(recipes: Mapping[str, Mapping[str, Any]], results: Mapping[str, Outcome]) -> None:
    """Write the page and its picture, of the recipes that have a result."""
    made = {name: results[name] for name in recipes if name in results}
    draw(made)
    PAGE.write_text(page(recipes, made))


def page(recipes: Mapping[str, Mapping[str, Any]], results: Mapping[str, Outcome]) -> str:
    lines = [
        HEAD,
        "| recipe | environment | model | algorithm | held-out success before | after | tasks | minutes | date |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, outcome in results.items():
        recipe = recipes[name]
        cells = [
            f"[{name}](#{name})",
            f"[{recipe['environment']}](../envs/{recipe['environment']}/README.md): {recipe['what']}",
            recipe["model"],
            recipe["algorithm"],
            *(str(outcome.estimate(index)) for index in (0, -1)),
            str(outcome.num_tasks),
            f"{outcome.minutes:.0f}",
            outcome.date,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"![Reward by step and held-out success of each recipe]({PICTURE.name})"]
    for name in results:
        commands = "\n".join(step["command"] for step in recipes[name]["steps"])
        lines += ["", f"## {name}", "", f"```\n{commands}\n```"]
    return "\n".join(lines) + "\n"


def draw(results: Mapping[str, Outcome]) -> None:
    """Draw the reward of each step, with its running mean, and the held-out success: a panel a recipe."""
    num_rows = -(-len(results) // COLUMNS)
    figure = Figure(figsize=(9.0, 2.1 * num_rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, COLUMNS, squeeze=False).ravel()
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    for axes, (name, outcome) in zip(panels, results.items(), strict=False):
        rewards = np.array(outcome.rewards)
        steps = np.arange(1, len(rewards) + 1)
        axes.plot(steps, rewards, ".", color=REWARD, alpha=0.35, markeredgewidth=0)
        axes.plot(steps, running_mean(rewards, RUNNING_MEAN_STEPS), color=REWARD)
        axes.plot(*zip(*outcome.success, strict=True), "D--", color=AFTER, markersize=4, linewidth=0.8)
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_ylim(min(SHARE_LIMITS[0], rewards.min()), SHARE_LIMITS[1])
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("reward (blue), held-out success (green)", fontsize=8)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    sys.exit(main())
