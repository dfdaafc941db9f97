"""Abort, pause and continue as JSON, and back."""

from typing import Any

from areal_agent.engine.fields import as_member, as_object, get, refuse_unknown
from areal_agent.engine_types import PauseMode

ABORT_REQUEST = "/abort_request"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"


def encode_pause(mode: PauseMode) -> dict[str, Any]:
    """The body of `/pause_generation`."""
    return {"mode": mode.value}


def decode_pause(body: object) -> PauseMode:
    """Read the body of `/pause_generation`; SGLang's default is `abort`."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"mode"}, PAUSE_GENERATION)
    return as_member(PauseMode, fields.get("mode", PauseMode.ABORT.value), "mode")


def encode_abort(request_id: str) -> dict[str, Any]:
    """The body of `/abort_request`."""
    return {"rid": request_id}


def decode_abort(body: object) -> str | None:
    """Read the body of `/abort_request`: the request's id, or None for all of them."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"rid", "abort_all"}, ABORT_REQUEST)
    return None if fields.get("abort_all") is True else get(fields, "rid", str)
