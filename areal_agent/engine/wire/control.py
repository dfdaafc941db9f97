"""All calls but `/generate` as JSON: pauses, weights, the memory of keys and values, and an engine's report.

Pushes, `push_id` and updates from shared memory are our extension of SGLang's API. The sender names its push. 400: the
weights or the version are refused. 409: another push is open, or this one is not.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_agent.engine.wire.fields import (
    UNLABELLED,
    Message,
    Version,
    WireError,
    as_integer,
    as_number,
    as_object,
    decode_version,
    get,
)
from areal_agent.types import (
    DeviceWeights,
    DiskWeights,
    DistributedWeights,
    EngineInfo,
    JsonObject,
    PauseMode,
    SharedMemoryWeights,
    TensorEntry,
    Weights,
    WeightVersion,
)

ABORT_REQUEST = "/abort_request"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"


class Abort(Message):
    rid: str | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _names_a_request(self) -> Self:
        if self.rid is None and not self.abort_all:
            raise ValueError("rid is missing; name a request, or set abort_all")
        return self


class Pause(Message):
    mode: PauseMode = PauseMode.ABORT  # SGLang's default
    push_id: str | None = None  # the push that this pause is a step of, if any


class Continue(Message):
    push_id: str | None = None


RELEASE_MEMORY = "/release_memory_occupation"
RESUME_MEMORY = "/resume_memory_occupation"


class Memory(Message):
    """The body of both memory calls. Only the memory of keys and values can be released."""

    tags: tuple[Literal["kv_cache"], ...] = Field(default=("kv_cache",), min_length=1, max_length=1)


UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_FROM_SHARED_MEMORY = "/update_weights_from_shared_memory"


class WeightUpdate(Message):
    """A set of weights to load in one call. The version is required: weights never change without a label."""

    weight_version: Version
    flush_cache: bool = True  # recompute the keys and values of every request under the new weights


class DiskUpdate(WeightUpdate):
    model_path: str

    @property
    def weights(self) -> DiskWeights:
        return DiskWeights(path=self.model_path)


class SharedMemoryUpdate(WeightUpdate):
    path: str
    entries: Annotated[tuple[TensorEntry, ...], Field(fail_fast=True)]
    crc32: int

    @property
    def weights(self) -> SharedMemoryWeights:
        return SharedMemoryWeights(path=self.path, entries=self.entries, crc32=self.crc32)


BEGIN_PUSH = "/begin_weight_push"
SEND_PUSH = "/send_weight_push"
COMMIT_PUSH = "/commit_weight_push"
ABORT_PUSH = "/abort_weight_push"

PushId = Annotated[str, Field(min_length=1, max_length=200)]


class Push(Message):
    """The body of `/begin_weight_push` and of `/abort_weight_push`."""

    push_id: PushId


class Folder(Message):
    model_path: str


class PushSend(Message):
    """The body of `/send_weight_push`, which has the weights in one of four forms."""

    push_id: PushId
    shared_memory: SharedMemoryWeights | None = None
    disk: Folder | None = None
    distributed: DistributedWeights | None = None
    device: DeviceWeights | None = None

    @classmethod
    def of(cls, push_id: str, weights: Weights) -> Self:
        match weights:
            case SharedMemoryWeights():
                return cls(push_id=push_id, shared_memory=weights)
            case DiskWeights():
                return cls(push_id=push_id, disk=Folder(model_path=weights.path))
            case DistributedWeights():
                return cls(push_id=push_id, distributed=weights)
            case DeviceWeights():
                return cls(push_id=push_id, device=weights)

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        forms = ("shared_memory", "disk", "distributed", "device")
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(given) or "none"
            raise ValueError(f"{SEND_PUSH} takes one of {', '.join(forms)}; it was given {told}")
        if self.distributed is not None:
            self._has_what_it_takes(self.distributed)
        return self

    @staticmethod
    def _has_what_it_takes(weights: DistributedWeights) -> None:
        numbers = [("bucket_bytes", weights.bucket_bytes), ("timeout_s", weights.timeout_s)]
        if not weights.parts:
            raise ValueError("parts is empty; it must have one at least")
        for name, value in [*numbers, *(("num_bytes", part.num_bytes) for part in weights.parts)]:
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")

    @property
    def weights(self) -> Weights:
        folder = self.disk and DiskWeights(path=self.disk.model_path)
        weights = self.shared_memory or self.distributed or self.device or folder
        assert weights is not None, "it has one form"
        return weights


class PushCommit(WeightUpdate):
    push_id: PushId


HEALTH = "/health"
SERVER_INFO = "/server_info"
MODEL_INFO = "/model_info"
METRICS = "/metrics"

UNTOLD_VOCAB_SIZE = 2**31 - 1
"""The vocabulary size of an engine that does not report it, such as SGLang: then no id is refused before it is sent."""

_CONTEXT_NAMES = ("max_context_tokens", "context_length", "max_req_input_len")  # our name, then SGLang's


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """An engine's work since it started, from `/server_info`."""

    num_running: int  # requests that hold a slot
    num_queued: int  # requests that wait for one
    busy_s: float | None  # seconds during which a step was running; None: not reported
    generated_tokens: int | None
    weight_version: WeightVersion
    num_serving: int = 1  # servers that get requests; a fleet may have several
    num_out: int = 0  # servers that get none: quarantined, catching up or leaving
    num_moves: int = 0  # requests that continued at another server


def encode_info(info: EngineInfo, stats: EngineStats) -> dict[str, Any]:
    """Encode the answer of `/server_info`, which includes that of `/model_info`."""
    return {
        "model_path": info.model_path,
        "weight_version": str(stats.weight_version),
        "vocab_size": info.vocab_size,
        "max_context_tokens": info.max_context_tokens,
        "has_grammar": info.has_grammar,
        "num_running_reqs": stats.num_running,
        "num_queue_reqs": stats.num_queued,
        "busy_s": stats.busy_s,
        "generated_tokens": stats.generated_tokens,
    }


def decode_info(body: object) -> EngineInfo:
    """Read the model's part of `/server_info`. SGLang's answer may lack fields."""
    fields = as_object(body, "the answer")
    version = fields.get("weight_version")
    return EngineInfo(
        model_path=get(fields, "model_path", str),
        weight_version=WeightVersion() if version == UNLABELLED else decode_version(version),
        vocab_size=as_integer(fields.get("vocab_size", UNTOLD_VOCAB_SIZE), "vocab_size"),
        max_context_tokens=_decode_context(fields),
        has_grammar=_decode_grammar(fields),
    )


def _decode_context(fields: JsonObject) -> int:
    """Read the context's length. SGLang may omit `context_length`, but always has `max_req_input_len`."""
    name = next((name for name in _CONTEXT_NAMES if fields.get(name) is not None), None)
    if name is None:
        raise WireError(f"none of {', '.join(_CONTEXT_NAMES)} is there: the length of the context must be known")
    return as_integer(fields[name], name)


def _decode_grammar(fields: JsonObject) -> bool:
    if "has_grammar" in fields:
        return get(fields, "has_grammar", bool)
    return fields.get("grammar_backend") not in (None, "none")


def decode_stats(body: object) -> EngineStats:
    """Read the work's part of `/server_info`."""
    fields = as_object(body, "the answer")
    return EngineStats(
        num_running=as_integer(fields.get("num_running_reqs"), "num_running_reqs"),
        num_queued=as_integer(fields.get("num_queue_reqs"), "num_queue_reqs"),
        busy_s=as_number(fields.get("busy_s"), "busy_s"),
        generated_tokens=as_integer(fields.get("generated_tokens"), "generated_tokens"),
        weight_version=decode_version(fields.get("weight_version")),
    )
