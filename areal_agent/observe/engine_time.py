"""Where the engine's time goes: every second between two readings belongs to exactly one activity. Pure.

It knows clocks that ran on their own, in other processes, and fits them into the wall time; it knows nobody who reads
them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReading:
    """Seconds and tokens, counted from some beginning on, at one moment.

    `wall_s` counts all time, and the others parts of it that overlap.
    """

    wall_s: float = 0.0
    starting_s: float = 0.0  # before the engine was there
    paused_s: float = 0.0  # held by a push
    busy_s: float = 0.0  # its model ran
    in_flight_s: float = 0.0  # at least one request was on its way to it, in it or on its way back
    rolling_s: float = 0.0  # at least one rollout was under way
    producing_s: float = 0.0  # rollouts were wanted: what then holds them back is the staleness bound
    generated_tokens: int = 0
    evaluated_tokens: int = 0  # of them, in answers of an evaluation


def engine_seconds(since: EngineReading, until: EngineReading) -> dict[str, float]:
    """The time from `since` to `until` by activity: none negative, in sum the wall time.

    Each activity gets what the ones before it have left: a push holds the engine, whatever it was doing; else its model
    runs, and that time goes to generating and evaluating by their tokens; else requests are on their way (gateway);
    else rollouts are busy with their own work (agents); else the staleness bound lets none run (admission). Clocks of
    several processes are read one after the other, and one of them may start anew: what does not fit is cut off.

    >>> now = EngineReading(wall_s=10.0, busy_s=4.0, in_flight_s=5.0, rolling_s=8.0)
    >>> seconds = engine_seconds(EngineReading(), now)
    >>> {name: spent for name, spent in seconds.items() if spent}
    {'generating': 4.0, 'waiting_for_gateway': 1.0, 'waiting_for_agents': 3.0, 'other': 2.0}
    """
    paused_s, busy_s = until.paused_s - since.paused_s, until.busy_s - since.busy_s
    in_flight_s, rolling_s = until.in_flight_s - since.in_flight_s, until.rolling_s - since.rolling_s
    left = _Left(until.wall_s - since.wall_s)
    starting_s = left.take(until.starting_s - since.starting_s)
    paused_s = left.take(paused_s)
    busy_s = left.take(busy_s)
    evaluating_s = busy_s * _share(
        until.evaluated_tokens - since.evaluated_tokens, until.generated_tokens - since.generated_tokens
    )
    return {
        "starting": starting_s,
        "paused_for_push": paused_s,
        "generating": busy_s - evaluating_s,
        "evaluating": evaluating_s,
        "waiting_for_gateway": left.take(in_flight_s - busy_s - paused_s),
        "waiting_for_agents": left.take(rolling_s - in_flight_s),
        "waiting_for_admission": left.take(until.producing_s - since.producing_s - rolling_s),
        "other": left.take(left.seconds),
    }


class _Left:
    """Time that belongs to no activity yet."""

    def __init__(self, seconds: float) -> None:
        self.seconds = max(0.0, seconds)

    def take(self, wanted_s: float) -> float:
        taken_s = min(max(0.0, wanted_s), self.seconds)
        self.seconds -= taken_s
        return taken_s


def _share(part: int, whole: int) -> float:
    return min(1.0, max(0, part) / whole) if whole > 0 else 0.0
