"""Weights and pushes as JSON, and back. All but `/update_weights_from_disk` is our extension of SGLang's API.

    POST /update_weights_from_disk           {"model_path", "weight_version", "flush_cache"?}
    POST /update_weights_from_shared_memory  {"path", "entries", "crc32", "weight_version", "flush_cache"?}
    POST /begin_weight_push   {"push_id"}
    POST /send_weight_push    {"push_id", "shared_memory": {"path", "entries", "crc32"}}, or "disk": {"model_path"},
                              or "distributed": {"host", "port", "name", "entries", "checksum", ...}
    POST /commit_weight_push  {"push_id", "weight_version", "flush_cache"?}
    POST /abort_weight_push   {"push_id"}

The sender names its push. 400: the weights or the version are refused. 409: another push is open, or this one is not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agent.engine.wire.fields import (
    WireError,
    as_ids,
    as_integer,
    as_number,
    as_object,
    decode_version,
    get,
    refuse_unknown,
)
from areal_agent.types import (
    DiskWeights,
    DistributedWeights,
    JsonObject,
    SharedMemoryWeights,
    TensorEntry,
    Weights,
    WeightVersion,
)

UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_FROM_SHARED_MEMORY = "/update_weights_from_shared_memory"

_LABEL = ("weight_version", "flush_cache")  # in every weight update


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One set of weights to load. `flush_cache`: recompute the KV cache of every request under the new weights."""

    weights: SharedMemoryWeights | DiskWeights
    version: WeightVersion
    flush_cache: bool = True


def encode_update(update: WeightUpdate) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the call that updates to these weights."""
    weights = update.weights
    label = {"weight_version": str(update.version), "flush_cache": update.flush_cache}
    if isinstance(weights, DiskWeights):
        return UPDATE_FROM_DISK, {**encode_disk(weights), **label}
    return UPDATE_FROM_SHARED_MEMORY, {**encode_shared_memory(weights), **label}


def encode_disk(weights: DiskWeights) -> dict[str, Any]:
    """Encode the location of a folder of weights."""
    return {"model_path": weights.path}


def encode_shared_memory(weights: SharedMemoryWeights) -> dict[str, Any]:
    """Encode the location, layout and checksum of a file of weights."""
    return {"path": weights.path, "entries": encode_entries(weights.entries), "crc32": weights.crc32}


def encode_entries(entries: Sequence[TensorEntry]) -> list[dict[str, Any]]:
    """Encode a layout: the place of each tensor."""
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
    """Read the location of a folder of weights."""
    fields = as_object(value, "disk")
    refuse_unknown(fields, {"model_path"}, "a folder of weights")
    return DiskWeights(path=get(fields, "model_path", str))


def decode_shared_memory(value: object) -> SharedMemoryWeights:
    """Read the location, layout and checksum of a file of weights."""
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
    """Read a layout."""
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


_FIELDS = {"host", "port", "name", "entries", "num_bytes", "bucket_bytes", "checksum", "timeout_s"}


def encode_distributed(weights: DistributedWeights) -> dict[str, Any]:
    """Encode where to request the weights, their layout and their checksum."""
    plain = {name: getattr(weights, name) for name in sorted(_FIELDS - {"entries"})}
    return {**plain, "entries": encode_entries(weights.entries)}


def decode_distributed(value: object) -> DistributedWeights:
    """Read what `encode_distributed` wrote."""
    fields = as_object(value, "distributed")
    refuse_unknown(fields, _FIELDS, "weights by torch.distributed")
    weights = DistributedWeights(
        host=get(fields, "host", str),
        port=as_integer(fields.get("port"), "port"),
        name=get(fields, "name", str),
        entries=decode_entries(fields),
        num_bytes=as_integer(fields.get("num_bytes"), "num_bytes"),
        bucket_bytes=as_integer(fields.get("bucket_bytes"), "bucket_bytes"),
        checksum=as_integer(fields.get("checksum"), "checksum"),
        timeout_s=as_number(fields.get("timeout_s"), "timeout_s"),
    )
    for name in ("num_bytes", "bucket_bytes", "timeout_s"):
        if getattr(weights, name) <= 0:
            raise WireError(f"{name} is {getattr(weights, name)}; it must be above 0")
    return weights


BEGIN_PUSH = "/begin_weight_push"
SEND_PUSH = "/send_weight_push"
COMMIT_PUSH = "/commit_weight_push"
ABORT_PUSH = "/abort_weight_push"

MAX_ID_LENGTH = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class PushSend:
    """The body of `/send_weight_push`."""

    push_id: str
    weights: Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class PushCommit:
    """The body of `/commit_weight_push`. `flush_cache` is as in a weight update."""

    push_id: str
    version: WeightVersion
    flush_cache: bool = True


def encode_push(push_id: str) -> dict[str, Any]:
    """Encode the body of `/begin_weight_push` and of `/abort_weight_push`."""
    return {"push_id": push_id}


def decode_push(body: object, path: str) -> str:
    """Read the body of either; return the id of the push."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"push_id"}, path)
    return _push_id(fields)


def encode_push_send(send: PushSend) -> dict[str, Any]:
    """Encode the body of `/send_weight_push`."""
    match send.weights:
        case DiskWeights() as weights:
            body = {"disk": encode_disk(weights)}
        case DistributedWeights() as weights:
            body = {"distributed": encode_distributed(weights)}
        case SharedMemoryWeights() as weights:
            body = {"shared_memory": encode_shared_memory(weights)}
    return {"push_id": send.push_id, **body}


def decode_push_send(body: object) -> PushSend:
    """Read the body of `/send_weight_push`."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"push_id", *_DECODERS}, SEND_PUSH)
    given = sorted(_DECODERS.keys() & fields.keys())
    if len(given) != 1:
        told = " and ".join(given) or "none"
        raise WireError(f"{SEND_PUSH} takes one of {', '.join(_DECODERS)}; it was given {told}")
    weights = _DECODERS[given[0]](fields[given[0]])
    return PushSend(push_id=_push_id(fields), weights=weights)


_DECODERS: Mapping[str, Callable[[object], Weights]] = {
    "shared_memory": decode_shared_memory,
    "disk": decode_disk,
    "distributed": decode_distributed,
}


def encode_push_commit(commit: PushCommit) -> dict[str, Any]:
    """Encode the body of `/commit_weight_push`."""
    return {"push_id": commit.push_id, "weight_version": str(commit.version), "flush_cache": commit.flush_cache}


def decode_push_commit(body: object) -> PushCommit:
    """Read the body of `/commit_weight_push`."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"push_id", "weight_version", "flush_cache"}, COMMIT_PUSH)
    return PushCommit(
        push_id=_push_id(fields),
        version=decode_version(fields.get("weight_version")),
        flush_cache=get({"flush_cache": True, **fields}, "flush_cache", bool),
    )


def _push_id(fields: JsonObject) -> str:
    push_id = get(fields, "push_id", str)
    if not 0 < len(push_id) <= MAX_ID_LENGTH:
        raise WireError(f"push_id is {push_id!r:.80}; it must have 1 to {MAX_ID_LENGTH} characters")
    return push_id
