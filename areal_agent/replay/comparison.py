"""The batches of a run, trained with other settings: each variant beside the run, step by step.

All begin with the same weights and take the same batches. The rollouts are the run's own: they say how an objective
learns from this data, not what a variant would have sampled. After each step the next batch is measured under the new
weights, which have not been trained on it.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.replay.training import Begin, Recording, Trainers, different_keys, own_config
from areal_agent.run.recorded import TrainerRecord
from areal_agent.trainer.wire import StepInput

RUN = "the run"
OTHERS_NOTE = (
    "The rollouts are those of the run: a variant is shown how it learns from them, not what it would have sampled."
)
SECTIONS = ("algorithm", "trainer")
"""The sections that a variant may change."""

CURVES = {
    "loss": ("loss",),
    "gradient norm": ("grad_norm",),
    "mean ratio": ("ratio_mean",),
    "share of clipped tokens": ("clip_fraction",),
    "divergence from the run, nats a token": ("divergence",),
    "log-probability: successes, others dashed": ("rewarded", "unrewarded"),
}
"""What is drawn, and the fields of a `Point` that it is of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One step of one side. The last four are of the next batch under the step's weights, NaN after the last step."""

    step: int
    loss: float
    grad_norm: float
    ratio_mean: float
    clip_fraction: float
    rewarded: float  # mean log-probability of the loss tokens of successes, nats
    unrewarded: float  # and of all other rollouts
    divergence: float  # KL(run || this side), estimator k3, nats a token


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Settings that differ from those of the run."""

    name: str
    adapt: Callable[[TrainerRecord], Config]


def variant_of(recording: Recording, overrides: Sequence[str]) -> Variant:
    """Return the variant of `key=value` overrides. Raises ConfigError for those that change more than the training."""

    def adapt(record: TrainerRecord) -> Config:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(record.config.to_yaml())
            file.flush()
            try:
                config = Config.load(file.name, overrides)
            except ConfigError as error:
                raise ConfigError(f"--with: {str(error).replace(file.name, 'the config of the run')}") from None
        before, after = (one.model_dump(mode="json") for one in (record.config, config))
        for key in different_keys(before, after):
            if key.partition(".")[0] not in SECTIONS:
                raise ConfigError(
                    f"--with {key}: the rollouts are those of the run; only {' and '.join(SECTIONS)} can be changed"
                )
        if config.algorithm.teacher != record.config.algorithm.teacher:
            raise ConfigError("--with algorithm.teacher: a teacher cannot be changed or added, only left as in the run")
        return config

    for record in recording.trainers.values():
        adapt(record)
    return Variant(name=" ".join(overrides), adapt=adapt)


def compare(
    recording: Recording,
    begin: Begin,
    steps: Sequence[int],
    variants: Sequence[Variant],
    show: Callable[[str], None],
) -> Mapping[str, Sequence[Point]]:
    """Return the points of the run and of each variant, by name. `show` is told of each step."""
    compared: dict[str, Sequence[Point]] = {}
    of_run: dict[int, NDArray[np.float64]] = {}
    for side in (Variant(name=RUN, adapt=own_config), *variants):
        points: list[Point] = []
        with Trainers(recording, begin, side.adapt) as trainers:
            for number, following in zip(steps, (*steps[1:], None), strict=True):
                record = recording.step(number)
                config = side.adapt(recording.trainer(record))
                worker = trainers.for_step(record)
                metrics: Mapping[str, float] = worker.train_step(recording.given(record, config))["metrics"]
                rewarded, unrewarded, divergence = math.nan, math.nan, math.nan
                if following is not None:
                    given = recording.given(recording.step(following), config)
                    by_record = worker.call("measure", {}, given.records)["logprobs"]
                    rewarded, unrewarded = _by_success(given, by_record, config.eval.success_reward)
                    measured = np.concatenate([np.asarray(one, dtype=np.float64) for one in by_record])
                    difference = measured - of_run.setdefault(number, measured)
                    divergence = float(np.mean(np.exp(difference) - 1 - difference))
                points.append(
                    Point(
                        step=number,
                        loss=metrics["loss"],
                        grad_norm=metrics["grad_norm"],
                        ratio_mean=metrics["ratio_mean"],
                        clip_fraction=metrics["clip_fraction_low"] + metrics["clip_fraction_high"],
                        rewarded=rewarded,
                        unrewarded=unrewarded,
                        divergence=divergence,
                    )
                )
                show(f"  {side.name}: step {number}, loss {metrics['loss']:.4f}")
        compared[side.name] = points
    return compared


def _by_success(given: StepInput, logprobs: Sequence[Sequence[float]], success: float) -> tuple[float, float]:
    """Return the mean log-probability of the loss tokens of successes, and of the others; NaN where there are none."""
    sides: dict[bool, list[float]] = {True: [], False: []}
    for record, of_record in zip(given.records, logprobs, strict=True):
        sides[given.rewards[record.session_id] >= success] += of_record
    rewarded, unrewarded = (math.fsum(one) / len(one) if one else math.nan for one in sides.values())
    return rewarded, unrewarded


def write_comparison(compared: Mapping[str, Sequence[Point]], folder: Path) -> str:
    """Write comparison.json and comparison.png to a new folder, and return the table."""
    folder.mkdir(parents=True)
    rows = {name: [asdict(point) for point in points] for name, points in compared.items()}
    (folder / "comparison.json").write_bytes(
        orjson.dumps({"note": OTHERS_NOTE, "sides": rows}, option=orjson.OPT_INDENT_2)  # NaN is null
    )
    _draw(compared, folder / "comparison.png")
    return "\n".join([*_table(compared), "", OTHERS_NOTE, f"in {folder}: comparison.json, comparison.png"])


def _table(compared: Mapping[str, Sequence[Point]]) -> list[str]:
    """Return a line for each side: means over all steps, and the last step whose next batch was measured."""
    width = max(map(len, compared))
    lines = [
        f"{'':{width}}  {'loss':>9} {'gradient':>9} {'ratio':>7} {'clipped':>8} | {'rewarded':>9} {'unrewarded':>10} "
        f"{'divergence':>10}"
    ]
    for name, points in compared.items():
        last = points[-2] if len(points) > 1 else points[-1]
        means = [
            float(np.mean([getattr(one, field) for one in points]))
            for field in ("loss", "grad_norm", "ratio_mean", "clip_fraction")
        ]
        lines.append(
            f"{name:{width}}  {means[0]:9.4f} {means[1]:9.4f} {means[2]:7.3f} {means[3]:8.4f} | {last.rewarded:9.4f} "
            f"{last.unrewarded:10.4f} {last.divergence:10.5f}"
        )
    return [
        "",
        *lines,
        "left: means over the steps; right: of the last batch before it is trained, nats a token",
    ]


def _draw(compared: Mapping[str, Sequence[Point]], path: Path) -> None:
    figure = Figure(figsize=(10.0, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, fields) in zip(figure.subplots(2, 3, sharex=True).flat, CURVES.items(), strict=True):
        for number, (side, points) in enumerate(compared.items()):
            for name, line in zip(fields, ("-", "--"), strict=False):
                values = [getattr(one, name) for one in points]
                label = side if line == "-" else None
                axes.plot(
                    [one.step for one in points],
                    values,
                    line,
                    color=f"C{number}",
                    marker="o",
                    markersize=3,
                    label=label,
                )
        axes.set_title(title, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=2)
    figure.savefig(path)
