"""What a gateway counts. Knows nothing of who reads it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from areal_agent.observe.busy import BusyClock
from areal_agent.types import ForkReason


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayStats:
    """The counts of a gateway since its start, at one moment."""

    num_open_sessions: int
    num_engine_requests: int  # in flight
    engine_busy_s: float  # seconds with at least one engine request in flight
    generated_tokens: int
    turns: int
    altered_completions: int  # their recorded probability is not the one they were sampled with
    malformed_tool_calls: int
    forks: Mapping[ForkReason, int]
    history_mismatches: int  # prompts whose text was not what the chat template writes, found when a session ended
    errors: Mapping[int, int]  # answers by HTTP status, 400 and up
    received_bytes: int  # of HTTP, heads included
    sent_bytes: int
    ended_by_timeout: int  # sessions that nobody called for too long


def add_up(several: Sequence[GatewayStats]) -> GatewayStats:
    """The counts of several gateways as those of one: each field is the sum. One gateway at least."""
    values = {field.name: [getattr(one, field.name) for one in several] for field in fields(GatewayStats)}
    return GatewayStats(**{name: _sum(of_each) for name, of_each in values.items()})


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return dict(sum(map(Counter[Any], values), Counter[Any]()))
    return sum(values)


class Counters:
    """The counts while they are counted."""

    def __init__(self) -> None:
        self.engine = BusyClock()
        self.generated_tokens = 0
        self.turns = 0
        self.altered_completions = 0
        self.malformed_tool_calls = 0
        self.forks: Counter[ForkReason] = Counter()
        self.history_mismatches = 0
        self.errors: Counter[int] = Counter()
        self.received_bytes = 0
        self.sent_bytes = 0
        self.ended_by_timeout = 0

    def count_error(self, status: int) -> None:
        self.errors[status] += 1

    def snapshot(self, *, num_open_sessions: int) -> GatewayStats:
        return GatewayStats(
            num_open_sessions=num_open_sessions,
            num_engine_requests=self.engine.num_running,
            engine_busy_s=self.engine.busy_s,
            generated_tokens=self.generated_tokens,
            turns=self.turns,
            altered_completions=self.altered_completions,
            malformed_tool_calls=self.malformed_tool_calls,
            forks=dict(self.forks),
            history_mismatches=self.history_mismatches,
            errors=dict(self.errors),
            received_bytes=self.received_bytes,
            sent_bytes=self.sent_bytes,
            ended_by_timeout=self.ended_by_timeout,
        )
