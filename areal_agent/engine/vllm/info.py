"""What a vLLM server says of itself: in `/v1/models`, `/weight_info` and `/metrics`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.engine.fields import WireError, as_integer, as_number, as_object, get
from areal_agent.engine.wire import EngineStats
from areal_agent.types import JsonObject, WeightVersion

MODELS = "/v1/models"
WEIGHT_INFO = "/weight_info"
IS_PAUSED = "/is_paused"
METRICS = "/metrics"

ADAPTER = "policy"
"""The name of the adapters that requests are answered with."""

UNLABELLED = "default"
"""vLLM's label of weights that nobody labelled: those of the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What a server was started with."""

    model: Path
    max_context_tokens: int
    adapter: Path | None = None  # that it was started with, where it applies adapters


def decode_started(body: object) -> Started:
    """Read `/v1/models`. Adapters are listed behind the model: ours alone, if any."""
    cards: list[Any] = get(as_object(body, MODELS), "data", list)
    if not cards:
        raise WireError("data is empty; it must name the model that is served")
    card, *others = [as_object(one, "an entry of data") for one in cards]
    adapters = [Path(get(one, "root", str)) for one in others if one.get("id") == ADAPTER]
    return Started(
        model=Path(get(card, "root", str)),
        max_context_tokens=as_integer(card.get("max_model_len"), "max_model_len"),
        adapter=adapters[0] if adapters else None,
    )


def decode_label(body: object) -> str:
    """Read `/weight_info`."""
    return get(as_object(body, WEIGHT_INFO), "weight_version", str)


def decode_metrics(text: str, version: WeightVersion) -> EngineStats:
    """Read `/metrics`, Prometheus' text: the sums over all engines of the server."""
    sums = _sums(text)
    return EngineStats(
        num_running=int(_told(sums, "vllm:num_requests_running")),
        num_queued=int(_told(sums, "vllm:num_requests_waiting")),
        busy_s=None,
        generated_tokens=int(_told(sums, "vllm:generation_tokens_total")),
        weight_version=version,
    )


def _sums(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, value = line.partition(" ")[0].partition("{")[0], line.rpartition(" ")[2]
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            raise WireError(f"{METRICS} has the line {line!r:.80}; it must end with a number") from None
    return sums


def _told(sums: JsonObject, name: str) -> float:
    return as_number(sums.get(name), name)
