"""The counters of a gateway, and `GET /metrics`, which shows them in Prometheus' format.

No label names a session, a task or a key.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from areal_agent.observe.clock import BusyClock
from areal_agent.types import ForkReason


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayStats:
    """The counts of a gateway since its start."""

    num_open_sessions: int
    num_engine_requests: int  # in flight
    engine_busy_s: float  # seconds with at least one engine request in flight
    engine_request_s: float  # the times of all engine requests, added up
    generated_tokens: int
    turns: int
    altered_completions: int  # completions recorded with another probability than they were sampled with
    malformed_tool_calls: int
    ignored_message_fields: int  # not empty, but of no consequence for the prompt
    forks: Mapping[ForkReason, int]
    history_mismatches: int  # prompts that differ from the chat template's text, found when a session ended
    errors: Mapping[int, int]  # number of answers by HTTP status, 400 and up
    received_bytes: int  # including HTTP heads
    sent_bytes: int
    ended_by_timeout: int  # sessions without a call for too long


def add_up(several: Sequence[GatewayStats]) -> GatewayStats:
    """Add up the counts of one or more gateways, field by field."""
    values = {field.name: [getattr(one, field.name) for one in several] for field in fields(GatewayStats)}
    return GatewayStats(**{name: _sum(of_each) for name, of_each in values.items()})


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return dict(sum(map(Counter[Any], values), Counter[Any]()))
    return sum(values)


class Counters:
    """The counters that the parts of a gateway increment."""

    def __init__(self) -> None:
        self.engine = BusyClock()
        self.generated_tokens = 0
        self.turns = 0
        self.altered_completions = 0
        self.malformed_tool_calls = 0
        self.ignored_message_fields = 0
        self.forks: Counter[ForkReason] = Counter()
        self.history_mismatches = 0
        self.errors: Counter[int] = Counter()
        self.received_bytes = 0
        self.sent_bytes = 0
        self.ended_by_timeout = 0

    def snapshot(self, *, num_open_sessions: int) -> GatewayStats:
        counted: dict[str, Any] = {
            name: dict(count) if isinstance(count, Counter) else count for name, count in vars(self).items()
        }
        engine: BusyClock = counted.pop("engine")
        return GatewayStats(
            num_open_sessions=num_open_sessions,
            num_engine_requests=engine.num_running,
            engine_busy_s=engine.busy_s,
            engine_request_s=engine.total_s,
            **counted,
        )


PREFIX = "areal_agent_gateway_"

TURN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class Metrics:
    """The Prometheus metrics of one gateway, in a registry of its own: a process may have several gateways."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, stats: Callable[[], GatewayStats]) -> None:
        self._stats = stats
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._turn_seconds = Histogram(
            f"{PREFIX}turn_seconds",
            "Time from the arrival of an agent's call to its answer, failed calls included.",
            buckets=TURN_SECONDS,
            registry=self._registry,
        )

    def turn(self) -> AbstractContextManager[object]:
        """Return a context manager that measures one call of an agent."""
        return self._turn_seconds.time()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that the registry asks for at each scrape."""
        stats = self._stats()
        for name, text, value in (
            ("open_sessions", "Sessions that are open.", stats.num_open_sessions),
            ("engine_requests", "Engine requests in flight.", stats.num_engine_requests),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in (
            ("engine_busy_seconds", "Time with an engine request in flight.", stats.engine_busy_s),
            ("engine_request_seconds", "The times of all engine requests, added up.", stats.engine_request_s),
            ("generated_tokens", "Tokens that the engine sampled.", stats.generated_tokens),
            ("turns", "Turns that were recorded.", stats.turns),
            ("altered_completions", "Completions recorded with altered probabilities.", stats.altered_completions),
            ("malformed_tool_calls", "Tool calls that no parser could read.", stats.malformed_tool_calls),
            ("ignored_message_fields", "Fields of messages that were ignored.", stats.ignored_message_fields),
            ("history_mismatches", "Prompts that differ from the chat template's text.", stats.history_mismatches),
            ("received_bytes", "Bytes received from clients, including HTTP heads.", stats.received_bytes),
            ("sent_bytes", "Bytes sent to clients, including HTTP heads.", stats.sent_bytes),
            ("timed_out_sessions", "Sessions ended because they made no call.", stats.ended_by_timeout),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, text, label, numbers in (
            ("forks", "Turns that did not continue the turn before.", "reason", stats.forks),
            ("errors", "Answers with a status of 400 and up.", "status", stats.errors),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=[label])
            for key, number in numbers.items():
                family.add_metric([str(key)], number)
            yield family
