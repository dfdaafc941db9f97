"""Every split of some GPUs into rollout and training: its steps an hour, its bottleneck, what a change would bring."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from areal_agent.config import Config
from areal_agent.engine.config import EnginePlan
from areal_agent.errors import ConfigError
from areal_agent.plan.calibration import SEEDS, Calibration, layout_of
from areal_agent.plan.simulation import Costs, Layout, Trace, Turn, simulate

NUM_STEPS = 16
"""Train steps that are counted, after those in which a run fills up."""
MAX_TURNS = 200_000
"""Of so many turns in one simulation, fewer steps are counted."""
SCALINGS = (0.8, 0.9, 1.0)
"""Train steps on g times the ranks are g to the power of these times as fast: at worst, as planned and at best."""
SHARED = 1.0
"""The contention where engine and trainer have one GPU: each is twice as slow while both work."""
WORTH_NAMING = 0.02
"""A part whose change brings less is no bottleneck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a split does: train steps an hour, and the shares of time in which each side works, 0 to 1."""

    rollout_gpus: int
    training_gpus: int
    per_hour: float
    low: float
    high: float
    training: float
    sampling: float
    bottleneck: str

    @property
    def is_shared(self) -> bool:
        return not self.training_gpus


class Planner:
    """Simulates a config under one calibration, on any number of GPUs."""

    def __init__(self, config: Config, calibration: Calibration) -> None:
        self._config = config
        self._calibration = calibration
        self._gpus_per_server = EnginePlan.of(config.engine).num_gpus
        groups = calibration.costs.groups
        num_turns = fmean(len(episode) for group in groups for episode in group) * config.batch_answers
        self._num_steps = max(2, min(NUM_STEPS, int(MAX_TURNS / num_turns) - config.max_staleness))

    def splits(self, num_gpus: int) -> list[tuple[int, int]]:
        """Return the GPUs of rollout and of training, every way; one GPU is shared, `(1, 0)`. Raises ConfigError."""
        size = self._gpus_per_server
        if num_gpus == 1 == size:
            return [(1, 0)]
        if num_gpus <= size:
            raise ConfigError(
                f"--gpus is {num_gpus}, but a server takes {size} by engine.server_args, and training needs one more; "
                f"give --gpus {size + 1} or more"
            )
        return [(rollout, num_gpus - rollout) for rollout in range(size, num_gpus, size)]

    def forecasts(self, num_gpus: int) -> list[Forecast]:
        """Return a forecast of each split."""
        return [self.forecast(*split) for split in self.splits(num_gpus)]

    def forecast(self, rollout_gpus: int, training_gpus: int, max_staleness: int | None = None) -> Forecast:
        """Simulate one split, also with other seeds, other scaling of the trainer, and each part twice as fast."""
        layouts = [self._layout(rollout_gpus, training_gpus, scaling) for scaling in SCALINGS]
        if max_staleness is not None:
            layouts = [replace(layout, max_staleness=max_staleness) for layout in layouts]
        costs = self._calibration.costs
        if not training_gpus:
            costs = replace(costs, contention=SHARED)
        slow, planned, fast = ([self._simulate(costs, layout, seed) for seed in SEEDS] for layout in layouts)
        skip = layouts[0].max_staleness + 1
        per_hour = fmean(trace.per_hour(skip) for trace in planned)
        rates = [trace.per_hour(skip) for trace in (*slow, *planned, *fast)]
        error = self._calibration.error
        wall_s = sum(trace.ends[-1] for trace in planned)
        return Forecast(
            rollout_gpus=rollout_gpus,
            training_gpus=training_gpus,
            per_hour=per_hour,
            low=min(rates) / (1.0 + error),
            high=max(rates) * (1.0 + error),
            training=sum(trace.training_s for trace in planned) / wall_s,
            sampling=sum(trace.sampling_s for trace in planned) / wall_s,
            bottleneck=self._bottleneck(costs, layouts[1], planned[0].per_hour(skip)),
        )

    def _layout(self, rollout_gpus: int, training_gpus: int, scaling: float) -> Layout:
        ranks = max(1, training_gpus) / self._calibration.num_ranks
        scale = self._config.batch_answers / self._calibration.batch_answers * ranks**-scaling
        return layout_of(self._config, num_servers=rollout_gpus // self._gpus_per_server, training_scale=scale)

    def _simulate(self, costs: Costs, layout: Layout, seed: int = 0) -> Trace:
        return simulate(costs, layout, self._num_steps + layout.max_staleness + 1, seed)

    def _bottleneck(self, costs: Costs, layout: Layout, per_hour: float) -> str:
        """Return the part of which a change brings the most, with that change and what it brings."""
        groups = [
            [[Turn(turn.wait_s / 2, turn.num_tokens) for turn in episode] for episode in group]
            for group in costs.groups
        ]
        sampling = replace(costs, token_s=costs.token_s / 2, crowd_s=costs.crowd_s / 2)
        trained = replace(layout, training_scale=layout.training_scale / 2)
        changed = {
            "training (twice as fast: {:+.0%})": (costs, trained),
            "sampling (twice as fast: {:+.0%})": (sampling, layout),
            "tool waits (halved: {:+.0%})": (replace(costs, groups=groups), layout),
            "pushes (halved: {:+.0%})": (replace(costs, push_s=costs.push_s / 2, stall_s=costs.stall_s / 2), layout),
            "max_concurrent (doubled: {:+.0%})": (costs, replace(layout, max_concurrent=2 * layout.max_concurrent)),
            "max_staleness (2 more: {:+.0%})": (costs, replace(layout, max_staleness=layout.max_staleness + 2)),
        }
        gains = {
            what: self._simulate(*one).per_hour(one[1].max_staleness + 1) / per_hour - 1.0
            for what, one in changed.items()
        }
        what = max(gains, key=gains.__getitem__)
        return what.format(gains[what]) if gains[what] > WORTH_NAMING else "no single one"


def lines(planner: Planner, config: Config, num_gpus: int) -> Iterator[str]:
    """Yield a plan for a person: a table of the splits, and what other settings would bring to the best one."""
    forecasts = planner.forecasts(num_gpus)
    yield f"{'rollout':>8} {'training':>9} {'steps/hour':>11} {'range':>15} {'engine':>7} {'trainer':>8}  bottleneck"
    for one in forecasts:
        training = "shared" if one.is_shared else one.training_gpus
        span = f"{_rate(one.low)}-{_rate(one.high)}"
        yield (
            f"{one.rollout_gpus:>8} {training:>9} {_rate(one.per_hour):>11} {span:>15} {one.sampling:>7.0%} "
            f"{one.training:>8.0%}  {one.bottleneck}"
        )
    best = max(forecasts, key=lambda one: one.per_hour)
    split = (best.rollout_gpus, best.training_gpus)
    yield f"best: {_named(best)}, {_rate(best.per_hour)} steps an hour"
    for bound in other_bounds(config.max_staleness):
        other = planner.forecast(*split, max_staleness=bound)
        yield f"  with max_staleness={bound}: {_rate(other.per_hour)} ({other.per_hour / best.per_hour - 1.0:+.0%})"
    more = max(planner.forecasts(num_gpus + 1), key=lambda one: one.per_hour)
    yield f"  with one GPU more ({_named(more)}): {_rate(more.per_hour)} ({more.per_hour / best.per_hour - 1.0:+.0%})"


def other_bounds(bound: int) -> Sequence[int]:
    """Return what else `max_staleness` may be: synchronous, half and double.

    >>> other_bounds(4), other_bounds(0), other_bounds(1)
    ([0, 2, 8], [1, 2], [0, 2])
    """
    return [0, *({bound // 2} - {0}), 2 * bound] if bound else [1, 2]


def _rate(per_hour: float) -> str:
    return f"{per_hour:,.0f}" if per_hour >= 10 else f"{per_hour:.2g}"


def _named(one: Forecast) -> str:
    return "one GPU for both" if one.is_shared else f"{one.rollout_gpus} for rollout, {one.training_gpus} for training"
