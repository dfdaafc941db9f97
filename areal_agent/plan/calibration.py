"""What a run's own records say of its costs; and, without a run, what to guess.

Engines, trainer and tools are measured together, so their times have to be told apart. A turn of c tokens, on a server
with n requests on average while it ran, f of its time beside a train step, took

    (c + k) (a + b n) (1 + g f)      seconds

with a, b, k and g fitted by least squares over all turns. A train step alone took 1 / (1 + g u) of its recorded time,
with a request at the engine for the share u of it. Tool waits are the gaps between the turns of a session.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from areal_agent.config import Config
from areal_agent.doctor.findings import gib
from areal_agent.doctor.model import BFLOAT16_BYTES, ModelShape, find_model, shape_of
from areal_agent.engine.config import EnginePlan
from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder
from areal_agent.ledger.files import ledger_in, reading
from areal_agent.ledger.questions import TurnTime, turn_times
from areal_agent.observe.metrics import Row, living_rows, read_metrics
from areal_agent.observe.progress import Progress
from areal_agent.plan.simulation import Costs, Episode, Layout, Turn, simulate
from areal_agent.types import SessionPurpose, role_of

MIN_STEPS = 4
"""A run needs so many train steps: the first ones fill it up, and two more are the least that can be averaged."""

SEEDS = (0, 1, 2)
"""A forecast is the mean of simulations with these seeds."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The costs, where they come from in words, and how wrong the model is expected to be (0.1: by 10%)."""

    costs: Costs
    told: Sequence[str]
    error: float
    num_ranks: int  # of the trainer to which the costs belong
    batch_answers: int  # of the train steps to which they belong


def layout_of(config: Config, *, num_servers: int, training_scale: float = 1.0) -> Layout:
    """Return what the model knows of a config."""
    return Layout(
        batch_size=config.batch_size,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        max_concurrent=config.rollout.max_concurrent,
        max_running_requests=config.engine.max_running_requests,
        num_servers=num_servers,
        training_scale=training_scale,
        drops_stale=config.straggler != "mask",
        straggler_wait_s=config.rollout.straggler_wait_s if config.straggler == "wait" else 0.0,
    )


def of_run(run_dir: Path, planned: Config) -> Calibration:
    """Calibrate from the records of a run, for a config that may differ from the run's.

    Raises ConfigError where the folder is not that of a run of its own rollouts with at least MIN_STEPS train steps.
    """
    ledger, folder = ledger_in(run_dir), RunFolder(run_dir)
    missing = next((path.name for path in (folder.config, folder.metrics) if not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"--from {str(run_dir)!r} has no {missing}, so it is not the folder of a training run")
    config = Config.load(folder.config)
    rows = living_rows(read_metrics(folder.metrics))
    if len(rows) < MIN_STEPS:
        raise ConfigError(
            f"--from {str(run_dir)!r} has {len(rows)} train steps, and a plan needs at least {MIN_STEPS} to average; "
            "let that run go on, or leave --from out"
        )
    with reading(ledger) as snapshot:
        turns = turn_times(snapshot)
    if not any(turn.purpose == SessionPurpose.TRAIN for turn in turns):
        raise ConfigError(
            f"the ledger of --from {str(run_dir)!r} has no turns of rollouts: those of an online run are with its "
            "gateway; name a run that has its own rollouts"
        )
    num_servers = config.engine.num_servers
    costs = costs_of(rows, turns, num_servers=num_servers)
    skip = min(config.max_staleness + 1, len(rows) - 2)
    measured = 3600.0 * (len(rows) - skip) / sum(row["seconds/wall"] for row in rows[skip:])
    layout = layout_of(config, num_servers=num_servers)
    modelled = fmean(simulate(costs, layout, len(rows), seed).per_hour(skip) for seed in SEEDS)
    error = modelled / measured - 1.0
    told = [
        f"{run_dir}: {len(rows)} steps, {measured:,.0f} an hour; the model makes {modelled:,.0f} ({error:+.0%}) of it"
    ]
    return Calibration(
        costs=costs,
        told=[*told, *_told(costs, rows), *_reservations(rows, config, planned)],
        error=max(MIN_ERROR, abs(error)),
        num_ranks=config.trainer.num_ranks,
        batch_answers=config.batch_answers,
    )


MIN_ERROR = 0.1
"""How wrong the model is expected to be even where it repeats the run that it is calibrated from."""


def costs_of(rows: Sequence[Row], turns: Sequence[TurnTime], *, num_servers: int) -> Costs:
    """Return the costs of a run from its rows, one a train step, and the times of its turns."""
    training = _training_spans(rows)
    starts, ends = (np.array([turn[at] for turn in turns], np.float64) for at in (5, 6))
    tokens = np.array([turn.num_tokens for turn in turns], np.float64)
    requests = Timeline(starts, ends)
    crowd = requests.mean(starts, ends) / num_servers
    beside = Timeline(*training).mean(starts, ends)
    token_s, crowd_s, turn_tokens, contention = fit_engine(tokens, ends - starts, crowd, np.minimum(1.0, beside))
    busy = np.minimum(1.0, requests.mean(*training))
    trained = [_spent(row, "training") for row in rows]
    others = [sum(value for name, value in row.items() if _is_between(name)) for row in rows]
    filtered = sum(row.get("rollouts/dropped/filtered") or 0 for row in rows)
    num_trained = sum(row["rollouts/trained"] for row in rows)
    return Costs(
        groups=groups_of(turns),
        token_s=token_s,
        crowd_s=crowd_s,
        turn_tokens=turn_tokens,
        training_s=[spent / (1.0 + contention * float(share)) for spent, share in zip(trained, busy, strict=True)],
        push_s=fmean(_spent(row, "pushing") for row in rows),
        stall_s=fmean(row.get("push/stall_s") or 0.0 for row in rows),
        between_s=fmean(others),
        contention=contention,
        kept_share=num_trained / max(1, num_trained + filtered),
    )


def _spent(row: Row, activity: str) -> float:
    return float(row.get(f"seconds/trainer/{activity}") or 0.0)


def _is_between(name: str) -> bool:
    """Return whether a time of the trainer's side comes with every step, and is neither modelled nor an evaluation."""
    others = ("training", "pushing", "waiting_for_rollouts", "starting", "evaluating")
    return name.startswith("seconds/trainer/") and not name.endswith(others)


def _training_spans(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Return when train steps began and ended, in Unix seconds: a row is written right after the push."""
    ends = np.array([row["time"] - _spent(row, "pushing") for row in rows])
    return ends - np.array([_spent(row, "training") for row in rows]), ends


class Timeline:
    """How many of some spans were under way, as a function of time."""

    def __init__(self, starts: Floats, ends: Floats) -> None:
        times = np.concatenate([starts, ends])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        counts = np.cumsum(np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order])
        passed = np.diff(self._times)
        self._areas = np.concatenate([[0.0], np.cumsum(counts[:-1] * passed)])

    def mean(self, starts: Floats, ends: Floats) -> Floats:
        """Return the mean number under way in each of these spans; 0 for an empty one.

        >>> timeline = Timeline(np.array([0.0, 1.0]), np.array([4.0, 3.0]))
        >>> timeline.mean(np.array([0.0, 3.0]), np.array([4.0, 5.0])).tolist()
        [1.5, 0.5]
        """
        areas = np.interp(ends, self._times, self._areas) - np.interp(starts, self._times, self._areas)
        return areas / np.maximum(ends - starts, 1e-9)


SHARES = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0)
"""What `turn_tokens` may be, in mean lengths of a turn."""
CONTENTIONS = tuple(number / 20 for number in range(41))


def fit_engine(tokens: Floats, seconds: Floats, crowd: Floats, beside: Floats) -> tuple[float, float, float, float]:
    """Return a, b, k and g of this file's first equation by least squares over turns; none of them is negative."""
    fits: list[tuple[float, tuple[float, float, float, float]]] = []
    is_beside = bool((beside > 0.0).any())
    for turn_tokens in (share * float(tokens.mean()) for share in SHARES):
        for contention in CONTENTIONS if is_beside else (0.0,):
            work = (tokens + turn_tokens) * (1.0 + contention * beside)
            columns = np.stack([work, work * crowd], axis=1)
            both = np.linalg.lstsq(columns, seconds, rcond=None)[0]
            alone = [float(column @ seconds / max(column @ column, 1e-12)) for column in columns.T]
            for a, b in ((float(both[0]), float(both[1])), (alone[0], 0.0), (0.0, alone[1])):
                if a >= 0.0 and b >= 0.0:
                    squares = float(np.square(columns @ np.array([a, b]) - seconds).sum())
                    fits.append((squares, (a, b, turn_tokens, contention)))
    return min(fits)[1]


def groups_of(turns: Sequence[TurnTime]) -> Sequence[Sequence[Episode]]:
    """Return the rollouts for training by group. Turns of one session that overlap count one after the other.

    Another role of a rollout counts as a rollout of its own, whose waits are for the others.
    """
    groups: dict[str, list[Episode]] = {}
    for _, of_session in groupby(turns, key=lambda turn: turn.session_id):
        episode, first, until_s = list[Turn](), None, 0.0
        for turn in of_session:
            first = first or turn
            until_s = until_s or turn.session_started_s
            episode.append(Turn(max(0.0, turn.started_s - until_s), float(max(1, turn.num_tokens))))
            until_s = max(until_s, turn.ended_s)
        assert first is not None  # groupby has no empty groups
        if first.purpose == SessionPurpose.TRAIN:
            episode.append(Turn(max(0.0, first.session_ended_s - until_s), 0.0))
            role = role_of(first.session_id, first.group_id)
            groups.setdefault(first.group_id.removesuffix(f"/{role}"), []).append(episode)
    return list(groups.values())


def _told(costs: Costs, rows: Sequence[Row]) -> list[str]:
    episodes = [episode for group in costs.groups for episode in group]
    waits = [turn.wait_s for episode in episodes for turn in episode[1:-1]] or [0.0]
    tokens = fmean(turn.num_tokens for episode in episodes for turn in episode[:-1])
    requests = fmean(row.get(RUNNING) or 0.0 for row in rows)
    return [
        f"rollouts: {fmean(len(one) - 1 for one in episodes):.1f} turns of {tokens:.0f} tokens, with tool waits of "
        f"{fmean(waits):.2f} s on average, 95% within {np.percentile(waits, 95):.2f} s",
        f"a server: {1e3 * costs.token_s:.2f} ms a token and {1e3 * costs.crowd_s:.3f} ms for each request that it "
        f"has; {requests:.1f} requests at once on average",
        f"the trainer: {fmean(costs.training_s):.2f} s a step, {costs.push_s:.2f} s a push, {costs.between_s:.2f} s "
        f"between; beside a working server, both take {costs.contention:.0%} longer",
    ]


RUNNING = "engine/mean_running_requests"

CARRIED = ("model", "workflow", "tasks", "engine.backend", "engine.server_args", "rollout.max_tokens", "algorithm")
"""Keys on which the costs of a run depend."""


def _reservations(rows: Sequence[Row], config: Config, planned: Config) -> Iterator[str]:
    """Yield why the costs of the run of `config` may not carry over to the planned one."""
    changed = [key for key in CARRIED if attrgetter(key)(config) != attrgetter(key)(planned)]
    if changed:
        yield f"that run had another {', '.join(changed)}: its times may not carry over"
    if not any("trainer/peak_device_memory_bytes" in row for row in rows):
        yield "that run computed on a CPU: each of its servers and ranks stands for one GPU"


MULTIPLIES_PER_S = 4e14
READS_BYTES_PER_S = 2e12
LINK_BYTES_PER_S = 1e10
BETWEEN_S = 1.0
GUESSED_ERROR = 0.5
"""Guesses of a GPU: floating point operations and bytes read a second as programs reach them, bytes of weights that a
push transfers a second, and the rest of a train step; and how wrong a plan of guesses may be."""


async def of_guesses(config: Config) -> Calibration:
    """Return `guessed` with the sizes of the config's model. Raises ConfigError where they are not known."""
    with TemporaryDirectory() as logs:
        found = await find_model(
            config, Path(logs), Progress(total_steps=0, mode="none"), with_weights=False, is_here=False
        )
    return guessed(config, await shape_of(config, found.folder))


def guessed(config: Config, shape: ModelShape) -> Calibration:
    """Return costs for a config that has not run: the model's sizes by the doctor's tables, and a GPU's speeds.

    A token reads the weights (2 P bytes) and the keys and values of every request; training takes 6 P operations a
    token, 2 P more for the proximal policy and 2 P for recomputed layers.
    """
    num_shards = EnginePlan.of(config.engine).num_shards
    weights = BFLOAT16_BYTES * shape.num_parameters
    kv = shape.kv_bytes(BFLOAT16_BYTES)
    num_tokens = config.rollout.max_tokens / 2
    operations = shape.num_parameters * (10 if config.trainer.gradient_checkpointing else 8)
    costs = Costs(
        groups=[[[Turn(0.0, num_tokens)]]],
        token_s=weights / READS_BYTES_PER_S / num_shards,
        crowd_s=kv * num_tokens / READS_BYTES_PER_S / num_shards,
        training_s=[operations * num_tokens * config.batch_answers / MULTIPLIES_PER_S],
        push_s=weights / LINK_BYTES_PER_S,
        between_s=BETWEEN_S,
    )
    told = [
        "guesses, since no run was named with --from:",
        f"by the doctor's tables: {shape.num_parameters / 1e6:,.1f} million parameters, {gib(weights)} of weights, "
        f"{kv / 1024:.1f} KiB of keys and values a token",
        f"a GPU multiplies at {MULTIPLIES_PER_S / 1e12:.0f} TFLOP/s and reads {READS_BYTES_PER_S / 1e12:.0f} TB/s; a "
        f"push transfers {LINK_BYTES_PER_S / 1e9:.0f} GB/s; {BETWEEN_S:.0f} s a step for the rest",
        f"a rollout is one turn of {num_tokens:.0f} tokens, half of rollout.max_tokens, without tools",
    ]
    return Calibration(costs=costs, told=told, error=GUESSED_ERROR, num_ranks=1, batch_answers=config.batch_answers)
