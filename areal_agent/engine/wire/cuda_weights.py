"""A set of weights in a GPU's memory as JSON, and back: handles as text, no pickle. Knows nothing of GPUs."""

from typing import Any

from areal_agent.engine.fields import as_integer, as_object, get, refuse_unknown
from areal_agent.engine.wire.weights import decode_entries, encode_entries
from areal_agent.engine_types import CudaMemory, CudaWeights

_MEMORY = {"gpu", "handle", "offset", "num_bytes", "counter", "counter_offset", "event", "waits_for_event"}


def encode_cuda(weights: CudaWeights) -> dict[str, Any]:
    """Where in which GPU they are, what lies where there, and their checksum."""
    memory = weights.memory
    return {
        "memory": {name: getattr(memory, name) for name in sorted(_MEMORY)},
        "entries": encode_entries(weights.entries),
        "checksum": weights.checksum,
    }


def decode_cuda(value: object) -> CudaWeights:
    """Read it."""
    fields = as_object(value, "cuda_ipc")
    refuse_unknown(fields, {"memory", "entries", "checksum"}, "weights in a GPU's memory")
    return CudaWeights(
        memory=_decode_memory(fields.get("memory")),
        entries=decode_entries(fields),
        checksum=as_integer(fields.get("checksum"), "checksum"),
    )


def _decode_memory(value: object) -> CudaMemory:
    fields = as_object(value, "memory")
    refuse_unknown(fields, _MEMORY, "a GPU's memory")
    return CudaMemory(
        gpu=get(fields, "gpu", str),
        handle=get(fields, "handle", str),
        offset=as_integer(fields.get("offset"), "offset"),
        num_bytes=as_integer(fields.get("num_bytes"), "num_bytes"),
        counter=get(fields, "counter", str),
        counter_offset=as_integer(fields.get("counter_offset"), "counter_offset"),
        event=get(fields, "event", str),
        waits_for_event=get(fields, "waits_for_event", bool),
    )
