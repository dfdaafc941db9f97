"""The four calls of a push as JSON, and back: our extension of SGLang's API, beside its weight updates in one call.

    POST /begin_weight_push   {"push_id"}
    POST /send_weight_push    {"push_id", "shared_memory": {"path", "entries", "crc32"}}, or "disk": {"model_path"},
                              "cuda_ipc": {"memory", "entries", "checksum"},
                              or "distributed": {"host", "port", "name", "entries", "checksum", ...}
    POST /commit_weight_push  {"push_id", "weight_version", "flush_cache"?}
    POST /abort_weight_push   {"push_id"}

The sender names its push. 400: the weights or the version are refused. 409: another push is open, or this one is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_agent.engine.fields import WireError, as_object, get, refuse_unknown
from areal_agent.engine.wire.cuda_weights import decode_cuda, encode_cuda
from areal_agent.engine.wire.distributed_weights import decode_distributed, encode_distributed
from areal_agent.engine.wire.versions import decode_version
from areal_agent.engine.wire.weights import decode_disk, decode_shared_memory, encode_disk, encode_shared_memory
from areal_agent.engine_types import CudaWeights, DiskWeights, DistributedWeights, SharedMemoryWeights, Weights
from areal_agent.types import JsonObject, WeightVersion

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
    """The body of `/commit_weight_push`. `flush_cache`: as in a weight update."""

    push_id: str
    version: WeightVersion
    flush_cache: bool = True


def encode_push(push_id: str) -> dict[str, Any]:
    """The body of `/begin_weight_push` and of `/abort_weight_push`."""
    return {"push_id": push_id}


def decode_push(body: object, path: str) -> str:
    """Read it; the id of the push."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"push_id"}, path)
    return _push_id(fields)


def encode_push_send(send: PushSend) -> dict[str, Any]:
    """The body of `/send_weight_push`."""
    match send.weights:
        case DiskWeights() as weights:
            body = {"disk": encode_disk(weights)}
        case CudaWeights() as weights:
            body = {"cuda_ipc": encode_cuda(weights)}
        case DistributedWeights() as weights:
            body = {"distributed": encode_distributed(weights)}
        case SharedMemoryWeights() as weights:
            body = {"shared_memory": encode_shared_memory(weights)}
    return {"push_id": send.push_id, **body}


def decode_push_send(body: object) -> PushSend:
    """Read it."""
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
    "cuda_ipc": decode_cuda,
    "distributed": decode_distributed,
}


def encode_push_commit(commit: PushCommit) -> dict[str, Any]:
    """The body of `/commit_weight_push`."""
    return {"push_id": commit.push_id, "weight_version": str(commit.version), "flush_cache": commit.flush_cache}


def decode_push_commit(body: object) -> PushCommit:
    """Read it."""
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
