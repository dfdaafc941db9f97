"""The engine's work as Prometheus text, under SGLang's names where SGLang has one, so that its dashboards fit."""

import time
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from areal_agent.engine.embedded.workload import Latency, Workload

WINDOW_S = 10.0
"""Seconds over which the rate is computed, or since the last reading, if that is longer."""


class Throughput:
    """The rate of a count that starts at 0 and only grows. Use it from one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._readings = deque([(now(), 0)])  # time and count; the first may be older than the window

    def rate(self, num_tokens: int) -> float:
        """Tokens per second over the window, given their number so far."""
        now_s = self._now()
        while len(self._readings) > 1 and self._readings[1][0] <= now_s - WINDOW_S:
            self._readings.popleft()
        since_s, before = self._readings[0]
        self._readings.append((now_s, num_tokens))
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0


class Metrics:
    """The metrics of one workload. Numbers read during a step may belong to two successive steps."""

    def __init__(self, work: Workload, *, model_name: str) -> None:
        self._work = work
        self._model_name = model_name
        self._throughput = Throughput()
        self._registry = CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]

    def text(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; the registry calls this."""
        work, counts = self._work, self._work.counts
        used = work.num_used_tokens
        yield self._gauge("sglang:num_running_reqs", "Requests that hold a slot", work.num_running)
        yield self._gauge("sglang:num_queue_reqs", "Requests that wait for a slot", work.num_waiting)
        yield self._gauge("sglang:num_used_tokens", "Tokens of running requests", used)
        yield self._gauge("sglang:token_usage", "Their share of the room for keys and values", used / work.kv_tokens)
        yield self._gauge("sglang:max_total_num_tokens", "Room for keys and values, in tokens", work.kv_tokens)
        yield self._gauge(
            "sglang:cache_hit_rate",
            "Share of prompt tokens that the prefix cache had",
            counts.cached_tokens / max(1, counts.prompt_tokens),
        )
        yield self._gauge(
            "sglang:gen_throughput",
            "Sampled tokens a second, since this was last asked, or over 10 s if that is longer",
            self._throughput.rate(counts.generated_tokens),
        )
        yield self._gauge(
            "areal_agent:prefix_cache_tokens", "Tokens that the prefix cache holds", work.num_cached_tokens
        )
        yield self._counter("sglang:num_requests", "Requests that arrived", counts.requests)
        yield self._counter("sglang:num_aborted_requests", "Requests that were aborted", counts.aborted_requests)
        yield self._counter("sglang:num_retracted_requests", "Retractions for want of room", counts.retracted_requests)
        yield self._counter("sglang:prompt_tokens", "Prompt tokens", counts.prompt_tokens)
        yield self._counter("sglang:cached_tokens", "Of them, found in the prefix cache", counts.cached_tokens)
        yield self._counter("sglang:generation_tokens", "Sampled tokens", counts.generated_tokens)
        yield self._counter("areal_agent:busy_seconds", "Seconds in which a step was running", counts.busy_s)
        yield self._histogram(
            "sglang:time_to_first_token_seconds", "From arrival to the first token", counts.to_first_token
        )
        yield self._histogram("sglang:e2e_request_latency_seconds", "From arrival to the answer", counts.to_answer)

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, what: str, value: Latency) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model_name], value.buckets(), value.sum_s)
        return family
