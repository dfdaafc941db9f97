"""The table and the plot of a grid of runs: by objective and bound, over seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from held_run import Outcome
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"naive": "#e07a5f", "decoupled": "#2a6f97"}
COLUMNS = (
    "objective",
    "max_staleness",
    "success, by seed",
    "mean",
    "tokens/s",
    "staleness, mean",
    "at most",
    "s a run",
    "cut short",
    "failed",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of the grid."""

    objective: str
    staleness: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}-s{self.staleness}-seed{self.seed}"


Results = Mapping[Trial, Outcome | None]
"""The outcome of each trial; None: the run failed."""
Cell = tuple[str, int]
"""Objective and bound."""


def table(results: Results) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for cell in sorted({(trial.objective, trial.staleness) for trial in results}):
        of_cell = [one for trial, one in results.items() if (trial.objective, trial.staleness) == cell]
        lines.append("| " + " | ".join(_row(cell, of_cell)) + " |")
    return "\n".join(lines)


def _row(cell: Cell, of_cell: Sequence[Outcome | None]) -> list[str]:
    done = [one for one in of_cell if one is not None]
    head, failed = [cell[0], str(cell[1])], str(len(of_cell) - len(done))
    if not done:
        return [*head, *[""] * (len(COLUMNS) - 3), failed]
    return [
        *head,
        ", ".join(f"{one.success:.3f}" for one in done),
        f"{statistics.fmean(one.success for one in done):.3f}",
        f"{statistics.fmean(one.tokens_per_s for one in done):.0f}",
        f"{statistics.fmean(one.staleness_mean for one in done):.1f}",
        str(max(one.staleness_max for one in done)),
        f"{statistics.fmean(one.wall_s for one in done):.0f}",
        str(sum(one.is_cut_short for one in done)),
        failed,
    ]


def draw(results: Results, path: Path) -> None:
    """Plot success above and throughput below, over the bound: a dot per seed, a line through the means."""
    done = {trial: one for trial, one in results.items() if one is not None}
    if not done:
        return
    figure = Figure(figsize=(7.0, 6.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    success_axes, rate_axes = figure.subplots(2, 1, sharex=True)
    bounds = sorted({trial.staleness for trial in done})
    for objective in dict.fromkeys(trial.objective for trial in done):
        of_it = [(bounds.index(trial.staleness), one) for trial, one in done.items() if trial.objective == objective]
        for axes, points in (
            (success_axes, [(place, one.success) for place, one in of_it]),
            (rate_axes, [(place, one.tokens_per_s) for place, one in of_it]),
        ):
            places = sorted({place for place, _ in points})
            means = [statistics.fmean(value for at, value in points if at == place) for place in places]
            axes.plot(places, means, color=COLOURS[objective], label=objective)
            axes.plot(*zip(*points, strict=True), "o", color=COLOURS[objective], alpha=0.4, markeredgewidth=0)
    success_axes.set_ylim(-0.03, 1.03)
    success_axes.set_ylabel("success after training")
    success_axes.legend(frameon=False)
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_ylabel("trained tokens/s")
    rate_axes.set_xlabel("max_staleness")
    rate_axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    figure.savefig(path)
