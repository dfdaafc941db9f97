"""curve.png: a run, or a supervised fine-tuning, in one picture, drawn from the rows of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

REWARD, BEFORE, AFTER = "#2a6f97", "#8d99ae", "#2b9348"
ENGINE, TRAINER, STALENESS = "#e07a5f", "#5e548e", "#8d99ae"
RUNNING_MEAN_STEPS = 5
SHARE_LIMITS = (-0.03, 1.1)  # a label fits above a level of 1

Column = NDArray[np.float64]
"""One metric, [steps]; NaN where a row has none."""


def draw_curve(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    success_before: float | None = None,
    success_after: float | None = None,
    success_between: Sequence[tuple[int, float]] = (),
) -> None:
    """Draw the reward by step with the success on held-out tasks, tokens per second of both sides, and staleness.

    `success_between` are evaluations beside training: the step whose weights they began under, and the success.
    """
    figure = Figure(figsize=(8.0, 6.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    reward_axes, rate_axes, staleness_axes = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.5, 1))
    steps = _column(rows, "step")
    for axes in (reward_axes, rate_axes, staleness_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
    draw_reward(reward_axes, steps, _column(rows, "reward/mean"))
    draw_success(success_before, success_after, success_between, _success_axes(reward_axes))
    _draw_rates(rate_axes, steps, _column(rows, "tokens_per_s/generated"), _column(rows, "tokens_per_s/trained"))
    _draw_staleness(staleness_axes, steps, _column(rows, "staleness/mean"), _column(rows, "staleness/max"))
    figure.savefig(path)


def draw_losses(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the loss of each step of a supervised fine-tuning, and the loss on what is held out."""
    figure = Figure(figsize=(8.0, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    steps, losses = _column(rows, "step"), _column(rows, "sft/loss")
    axes.plot(steps, losses, "o", color=REWARD, alpha=0.4, markersize=4, markeredgewidth=0, label="a step")
    measured = _column(rows, "sft/held_out_loss")
    is_measured = np.isfinite(measured)
    axes.plot(steps[is_measured], measured[is_measured], "D-", color=AFTER, markersize=5, label="held out")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title("Supervised fine-tuning", loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _legend(axes)
    figure.savefig(path)


def running_mean(values: Column, window: int) -> Column:
    """Return the mean of each value and the `window - 1` before it, without missing ones (NaN)."""
    return np.array([_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)])


def _mean(values: Column) -> float:
    present = values[np.isfinite(values)]
    return float(present.mean()) if len(present) else float("nan")


def _highest(*columns: Column) -> float:
    """Return the largest value, at least 1."""
    return max([1.0, *(float(value) for column in columns for value in column if np.isfinite(value))])


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Column:
    return np.array([np.nan if row.get(name) is None else float(row[name]) for row in rows])


def draw_reward(axes: Axes, steps: Column, rewards: Column) -> None:
    """Draw the reward of each step and its running mean, over the whole range of a share where it is one."""
    axes.plot(steps, rewards, "o", color=REWARD, alpha=0.4, markersize=5, markeredgewidth=0, label="mean of a step")
    smooth = running_mean(rewards, RUNNING_MEAN_STEPS)
    axes.plot(steps, smooth, color=REWARD, linewidth=2.2, label=f"mean of {RUNNING_MEAN_STEPS} steps")
    present = rewards[np.isfinite(rewards)]
    if not len(present) or (present.min() >= 0.0 and present.max() <= 1.0):
        axes.set_ylim(SHARE_LIMITS)
    axes.set_ylabel("reward")
    axes.set_title("Reward of the rollouts, success on held-out tasks", loc="left", fontsize=10)
    _legend(axes)


def _success_axes(axes: Axes) -> Axes:
    """Return the axes of success, a share: the reward's when it goes from 0 to 1, otherwise its own at the right."""
    if axes.get_ylim() == SHARE_LIMITS:
        return axes
    own = axes.twinx()
    own.set_ylim(SHARE_LIMITS)
    own.set_ylabel("success")
    own.spines["top"].set_visible(False)
    return own


def draw_success(before: float | None, after: float | None, between: Sequence[tuple[int, float]], axes: Axes) -> None:
    """Draw dashed levels, labelled away from a rising curve (the lower at the right, the upper at the left).

    Each evaluation beside training is a diamond.
    """
    axes.plot(
        [step for step, _ in between],
        [success for _, success in between],
        "D",
        color=AFTER,
        markersize=5,
        markeredgecolor="white",
        zorder=3,
    )
    if before is not None:
        _draw_level(axes, before, f"success before training: {before:.1%}", BEFORE, side="right")
    if after is not None:
        _draw_level(axes, after, f"success after training: {after:.1%}", AFTER, side="left")


def _draw_level(axes: Axes, level: float, label: str, colour: str, side: Literal["left", "right"]) -> None:
    axes.axhline(level, color=colour, linestyle=(0, (6, 4)), linewidth=1.4)
    axes.annotate(
        label,
        xy=(0.005 if side == "left" else 0.995, level),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 4),  # in points
        textcoords="offset points",
        horizontalalignment=side,
        color=colour,
        fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 0.5},  # hides the curve behind it
        zorder=4,
    )


def _draw_rates(axes: Axes, steps: Column, generated: Column, trained: Column) -> None:
    axes.plot(steps, generated, color=ENGINE, linewidth=1.6, marker=".", label="sampled")
    axes.plot(steps, trained, color=TRAINER, linewidth=1.6, marker=".", label="trained")
    axes.set_ylim(0, _highest(generated, trained) * 1.1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("tokens/s")
    _legend(axes)


def _draw_staleness(axes: Axes, steps: Column, mean: Column, highest: Column) -> None:
    axes.bar(steps, highest, color=STALENESS, alpha=0.3, width=0.8, label="highest")
    axes.plot(steps, mean, color=TRAINER, linewidth=1.6, marker=".", label="mean of the tokens")
    axes.set_ylim(0, _highest(highest) * 1.1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("staleness")
    axes.set_xlabel("train step")
    if len(steps):
        axes.set_xlim(steps[0] - 0.7, steps[-1] + 0.7)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Put the legend above the axes, where it hides nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, ncols=2, fontsize=9, borderaxespad=0.2)
