"""A set of weights and its label as the JSON of the two update paths, and back. Knows nothing of who reads weights.

`/update_weights_from_shared_memory` is our one extension of SGLang's API: its body is a `SharedMemoryWeights`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_agent.engine.fields import as_ids, as_integer, as_object, get, refuse_unknown
from areal_agent.engine.wire.versions import decode_version
from areal_agent.engine_types import DiskWeights, SharedMemoryWeights, TensorEntry
from areal_agent.types import JsonObject, WeightVersion

UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_FROM_SHARED_MEMORY = "/update_weights_from_shared_memory"

_LABEL = ("weight_version", "flush_cache")  # what every weight update carries


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One set of weights to load. `flush_cache`: recompute the KV cache of every request under the new weights."""

    weights: SharedMemoryWeights | DiskWeights
    version: WeightVersion
    flush_cache: bool = True


def encode_update(update: WeightUpdate) -> tuple[str, dict[str, Any]]:
    """The path and the body that hand these weights over."""
    weights = update.weights
    label = {"weight_version": str(update.version), "flush_cache": update.flush_cache}
    if isinstance(weights, DiskWeights):
        return UPDATE_FROM_DISK, {**encode_disk(weights), **label}
    return UPDATE_FROM_SHARED_MEMORY, {**encode_shared_memory(weights), **label}


def encode_disk(weights: DiskWeights) -> dict[str, Any]:
    """Where a folder of weights is."""
    return {"model_path": weights.path}


def encode_shared_memory(weights: SharedMemoryWeights) -> dict[str, Any]:
    """Where a file of weights is, what lies where in it, and its checksum."""
    return {"path": weights.path, "entries": encode_entries(weights.entries), "crc32": weights.crc32}


def encode_entries(entries: Sequence[TensorEntry]) -> list[dict[str, Any]]:
    """What lies where."""
    return [
        {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "offset": e.offset, "num_bytes": e.num_bytes}
        for e in entries
    ]


def decode_disk_update(body: object) -> WeightUpdate:
    """Read the body of `/update_weights_from_disk`. The version is required: weights never change without a label."""
    fields = as_object(body, "the body")
    return _labelled(fields, decode_disk(_without_label(fields)))


def decode_shared_memory_update(body: object) -> WeightUpdate:
    """Read the body of `/update_weights_from_shared_memory`."""
    fields = as_object(body, "the body")
    return _labelled(fields, decode_shared_memory(_without_label(fields)))


def decode_disk(value: object) -> DiskWeights:
    """Read where a folder of weights is."""
    fields = as_object(value, "disk")
    refuse_unknown(fields, {"model_path"}, "a folder of weights")
    return DiskWeights(path=get(fields, "model_path", str))


def decode_shared_memory(value: object) -> SharedMemoryWeights:
    """Read where a file of weights is, and what lies where in it."""
    fields = as_object(value, "shared_memory")
    refuse_unknown(fields, {"path", "entries", "crc32"}, "a file of weights")
    return SharedMemoryWeights(
        path=get(fields, "path", str),
        entries=decode_entries(fields),
        crc32=as_integer(fields.get("crc32"), "crc32"),
    )


def _without_label(fields: JsonObject) -> JsonObject:
    return {name: value for name, value in fields.items() if name not in _LABEL}


def _labelled(fields: JsonObject, weights: SharedMemoryWeights | DiskWeights) -> WeightUpdate:
    flush_cache = get({"flush_cache": True, **fields}, "flush_cache", bool)
    return WeightUpdate(weights=weights, version=decode_version(fields.get("weight_version")), flush_cache=flush_cache)


def decode_entries(fields: JsonObject) -> tuple[TensorEntry, ...]:
    """Read what lies where."""
    return tuple(_decode_entry(entry) for entry in get(fields, "entries", list))


def _decode_entry(entry: object) -> TensorEntry:
    fields = as_object(entry, "an entry of entries")
    return TensorEntry(
        name=get(fields, "name", str),
        dtype=get(fields, "dtype", str),
        shape=as_ids(get(fields, "shape", list), "shape"),
        offset=as_integer(fields.get("offset"), "offset"),
        num_bytes=as_integer(fields.get("num_bytes"), "num_bytes"),
    )
