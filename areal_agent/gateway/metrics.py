"""`GET /metrics`: what a gateway counts, as Prometheus reads it. No label names a session, a task or a key."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from areal_agent.gateway.stats import GatewayStats

TURN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class Metrics:
    """The metrics of one gateway, in a registry of its own: several gateways may live in one process."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, stats: Callable[[], GatewayStats]) -> None:
        self._stats = stats
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._turn_seconds = Histogram(
            "areal_agent_gateway_turn_seconds",
            "Time from the arrival of an agent's call to its answer, failed calls included.",
            buckets=TURN_SECONDS,
            registry=self._registry,
        )

    def turn(self) -> AbstractContextManager[object]:
        """Measures one call of an agent."""
        return self._turn_seconds.time()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """What the registry asks for at each scrape."""
        stats = self._stats()
        yield _gauge("open_sessions", "Sessions that are open.", stats.num_open_sessions)
        yield _gauge("engine_requests", "Engine requests in flight.", stats.num_engine_requests)
        yield _counter("engine_busy_seconds", "Time with an engine request in flight.", stats.engine_busy_s)
        yield _counter("generated_tokens", "Tokens that the engine sampled.", stats.generated_tokens)
        yield _counter("turns", "Turns that were recorded.", stats.turns)
        yield _counter(
            "altered_completions", "Completions without their sampling probability.", stats.altered_completions
        )
        yield _counter("malformed_tool_calls", "Tool calls that no parser could read.", stats.malformed_tool_calls)
        yield _counter(
            "history_mismatches", "Prompts that the chat template writes otherwise.", stats.history_mismatches
        )
        yield _counter("received_bytes", "Bytes that clients sent, heads included.", stats.received_bytes)
        yield _counter("sent_bytes", "Bytes that clients were sent, heads included.", stats.sent_bytes)
        yield _counter("timed_out_sessions", "Sessions ended because nobody called them.", stats.ended_by_timeout)
        yield _counter_by("forks", "Turns that left the conversation before them.", "reason", stats.forks)
        yield _counter_by("errors", "Answers with a status of 400 and up.", "status", stats.errors)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"areal_agent_gateway_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"areal_agent_gateway_{name}", text, value=value)


def _counter_by(name: str, text: str, label: str, values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"areal_agent_gateway_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family
