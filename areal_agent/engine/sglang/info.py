"""What a SGLang server says of itself. `/model_info` is what serves now; `/server_info` is what it was started with."""

from pathlib import Path
from typing import Any

from areal_agent.engine import wire
from areal_agent.engine.fields import as_integer, as_object, get
from areal_agent.engine.foreign.weights import Served
from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import EngineInfo
from areal_agent.types import WeightVersion

LOADS = "/v1/loads"

RECEIVED = "areal-agent-push:"
"""In front of a push: the path of what came in it by torch.distributed (scheduler_extension.py)."""

_UNLABELLED = "default"  # SGLang's label of weights that nobody labelled


def decode_served(model_info: object) -> Served:
    """Read `/model_info`. The label in `/server_info` is the one of the start, for ever."""
    fields = as_object(model_info, wire.MODEL_INFO)
    path = get(fields, "model_path", str)
    source = None if path.startswith(RECEIVED) else Path(path)
    return Served(source=source, label=get(fields, "weight_version", str))


def decode_start(server_info: object) -> EngineInfo:
    """What the server was started with, but for its vocabulary, which it does not tell.

    Its context is `max_req_input_len`: a longer request that `context_length` has room for is cut without a word.
    """
    started = as_object(server_info, wire.SERVER_INFO)
    return wire.decode_info({**started, "context_length": None, "weight_version": _UNLABELLED})


def tells_new_tokens(server_info: object) -> bool:
    """Whether the events of an answer hold its new tokens alone, as on the common wire."""
    return as_object(server_info, wire.SERVER_INFO).get("incremental_streaming_output") is not False


def decode_loads(body: object, version: WeightVersion) -> EngineStats:
    """How many requests run and wait, over all schedulers of the server."""
    loads: list[Any] = get(as_object(body, LOADS), "loads", list)
    fields = [as_object(load, "an entry of loads") for load in loads]
    return EngineStats(
        num_running=sum(as_integer(load.get("num_running_reqs"), "num_running_reqs") for load in fields),
        num_queued=sum(as_integer(load.get("num_waiting_reqs"), "num_waiting_reqs") for load in fields),
        busy_s=None,
        generated_tokens=None,
        weight_version=version,
    )
