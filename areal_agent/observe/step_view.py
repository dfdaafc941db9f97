"""The numbers of one step that a person sees, and how times, rates and shares are written. Pure."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """One train step. `engine` and `trainer` say what each side did, as shares of the step's time by activity.

    Activities that begin with `waiting_for_` or `paused_for_` are waiting.

    >>> biggest_wait({"generating": 0.7, "waiting_for_agents": 0.2, "paused_for_push": 0.1})
    ('agents', 0.2)
    """

    step: int
    reward: float
    success: float  # of the trained rollouts, 0 to 1
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    engine: Mapping[str, float]
    trainer: Mapping[str, float]


WAITING = ("waiting_for_", "paused_for_")
LEAST_SHARE = 0.005
"""Less is not worth a word: it would be written as 0%."""


def biggest_wait(shares: Mapping[str, float]) -> tuple[str, float] | None:
    """What a side waited for most, and its share; None when it did not wait."""
    waits = {words(name, WAITING): share for name, share in shares.items() if name.startswith(WAITING)}
    if max(waits.values(), default=0.0) < LEAST_SHARE:
        return None
    return max(waits.items(), key=lambda wait: wait[1])


def words(activity: str, without: tuple[str, ...] = ()) -> str:
    """`waiting_for_agents` as a person writes it, without one of the prefixes `without`."""
    for prefix in without:
        activity = activity.removeprefix(prefix)
    return activity.replace("_", " ")


def clock_time(seconds: float) -> str:
    """
    >>> clock_time(75.4), clock_time(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TimeLeft:
    """Estimates the time left from the median of the last steps: one slow step does not alarm anybody."""

    WINDOW = 10

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._durations_s: list[float] = []
        self._since_s: float | None = None

    def start(self, now_s: float) -> None:
        """The next step begins now."""
        self._since_s = now_s

    def step(self, step: int, now_s: float) -> float | None:
        """`step` is done; the seconds that are left after it, None while no step's duration is known."""
        if self._since_s is not None:
            self._durations_s = [*self._durations_s, now_s - self._since_s][-self.WINDOW :]
        self._since_s = now_s
        if not self._durations_s:
            return None
        return statistics.median(self._durations_s) * max(0, self._total_steps - step)
