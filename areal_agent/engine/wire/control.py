"""Control calls as JSON, and back: abort, pause and continue, the memory of keys and values, and `/server_info`.

POST /pause_generation            {"mode"?, "push_id"?}      the push that this pause is a step of, if any
POST /continue_generation         {"push_id"?}               SGLang has no pushes, and no such field
POST /release_memory_occupation   {"tags"?: ["kv_cache"]}    SGLang's path; only this tag
POST /resume_memory_occupation    the same
"""

from dataclasses import dataclass
from typing import Any

from areal_agent.engine.wire.fields import (
    WireError,
    as_integer,
    as_member,
    as_number,
    as_object,
    decode_version,
    get,
    refuse_unknown,
)
from areal_agent.types import EngineInfo, JsonObject, PauseMode, WeightVersion

ABORT_REQUEST = "/abort_request"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """The body of `/pause_generation`."""

    mode: PauseMode
    push_id: str | None = None


def encode_pause(pause: Pause) -> dict[str, Any]:
    """Encode the body of `/pause_generation`."""
    return {"mode": pause.mode.value, **encode_continue(pause.push_id)}


def decode_pause(body: object) -> Pause:
    """Read the body of `/pause_generation`. SGLang's default mode is `abort`."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"mode", "push_id"}, PAUSE_GENERATION)
    mode = as_member(PauseMode, fields.get("mode", PauseMode.ABORT.value), "mode")
    return Pause(mode=mode, push_id=_push_id(fields))


def encode_continue(push_id: str | None) -> dict[str, Any]:
    """Encode the body of `/continue_generation`."""
    return {} if push_id is None else {"push_id": push_id}


def decode_continue(body: object) -> str | None:
    """Read the body of `/continue_generation`; return the id of the calling push, or None."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"push_id"}, CONTINUE_GENERATION)
    return _push_id(fields)


def encode_abort(request_id: str) -> dict[str, Any]:
    """Encode the body of `/abort_request`."""
    return {"rid": request_id}


def decode_abort(body: object) -> str | None:
    """Read the body of `/abort_request`; return the request's id, or None for all requests."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"rid", "abort_all"}, ABORT_REQUEST)
    return None if fields.get("abort_all") is True else get(fields, "rid", str)


def _push_id(fields: JsonObject) -> str | None:
    return None if fields.get("push_id") is None else get(fields, "push_id", str)


RELEASE_MEMORY = "/release_memory_occupation"
RESUME_MEMORY = "/resume_memory_occupation"

_TAGS = ["kv_cache"]


def encode_memory() -> dict[str, Any]:
    """Encode the body of both memory calls."""
    return {"tags": _TAGS}


def check_memory(body: object, path: str) -> None:
    """Check the body of a memory call. Raises WireError for anything but keys and values."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"tags"}, path)
    tags = get({"tags": _TAGS, **fields}, "tags", list)
    if tags != _TAGS:
        raise WireError(f"tags is {tags!r:.80}; {path} takes {_TAGS}: of keys and values alone")


HEALTH = "/health"
SERVER_INFO = "/server_info"
MODEL_INFO = "/model_info"
METRICS = "/metrics"

UNTOLD_VOCAB_SIZE = 2**31 - 1
"""The vocabulary size of an engine that does not report it, such as SGLang: then no id is refused before it is sent."""

_CONTEXT_NAMES = ("max_context_tokens", "context_length", "max_req_input_len")  # our name, then SGLang's
_UNLABELLED = "default"  # SGLang's label of the weights that it starts with


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
        weight_version=WeightVersion() if version == _UNLABELLED else decode_version(version),
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
