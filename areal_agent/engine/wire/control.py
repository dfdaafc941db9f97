"""Abort, pause and continue as JSON, and back.

POST /pause_generation      {"mode"?, "push_id"?}      the push that this pause is a step of, if it is one
POST /continue_generation   {"push_id"?}               SGLang has no pushes, and no such field
"""

from dataclasses import dataclass
from typing import Any

from areal_agent.engine.fields import as_member, as_object, get, refuse_unknown
from areal_agent.engine_types import PauseMode
from areal_agent.types import JsonObject

ABORT_REQUEST = "/abort_request"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """The body of `/pause_generation`."""

    mode: PauseMode
    push_id: str | None = None


def encode_pause(pause: Pause) -> dict[str, Any]:
    """The body of `/pause_generation`."""
    return {"mode": pause.mode.value, **encode_continue(pause.push_id)}


def decode_pause(body: object) -> Pause:
    """Read it; SGLang's default is `abort`."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"mode", "push_id"}, PAUSE_GENERATION)
    mode = as_member(PauseMode, fields.get("mode", PauseMode.ABORT.value), "mode")
    return Pause(mode=mode, push_id=_push_id(fields))


def encode_continue(push_id: str | None) -> dict[str, Any]:
    """The body of `/continue_generation`."""
    return {} if push_id is None else {"push_id": push_id}


def decode_continue(body: object) -> str | None:
    """Read it; the push that speaks."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"push_id"}, CONTINUE_GENERATION)
    return _push_id(fields)


def encode_abort(request_id: str) -> dict[str, Any]:
    """The body of `/abort_request`."""
    return {"rid": request_id}


def decode_abort(body: object) -> str | None:
    """Read the body of `/abort_request`: the request's id, or None for all of them."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"rid", "abort_all"}, ABORT_REQUEST)
    return None if fields.get("abort_all") is True else get(fields, "rid", str)


def _push_id(fields: JsonObject) -> str | None:
    return None if fields.get("push_id") is None else get(fields, "push_id", str)
