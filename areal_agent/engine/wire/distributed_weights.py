"""A set of weights that the trainer sends by torch.distributed as JSON, and back. Knows nothing of process groups."""

from typing import Any

from areal_agent.engine.fields import WireError, as_integer, as_number, as_object, get, refuse_unknown
from areal_agent.engine.wire.weights import decode_entries, encode_entries
from areal_agent.engine_types import DistributedWeights

_FIELDS = {"host", "port", "name", "entries", "num_bytes", "bucket_bytes", "checksum", "timeout_s"}


def encode_distributed(weights: DistributedWeights) -> dict[str, Any]:
    """Where to ask for them, what lies where in them, and their checksum."""
    plain = {name: getattr(weights, name) for name in sorted(_FIELDS - {"entries"})}
    return {**plain, "entries": encode_entries(weights.entries)}


def decode_distributed(value: object) -> DistributedWeights:
    """Read it."""
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
