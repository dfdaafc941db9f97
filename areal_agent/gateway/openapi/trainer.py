"""The calls of a trainer that leases from a gateway which stands alone. A gateway inside a run has none of them."""

from typing import Any

from areal_agent.gateway.openapi.parts import (
    NAME,
    JsonSchema,
    answer_object,
    closed_object,
    integer,
    list_of,
    nullable,
    number,
    one_of,
    operation,
    optional,
    ref,
    text,
)
from areal_agent.types import Drop

_MAX_COUNT = 2**31 - 1
_COUNTS: JsonSchema = {"type": "object", "additionalProperties": integer(low=0)}
_STEP = integer(1, _MAX_COUNT)
_VERSION = integer(0, _MAX_COUNT)
_SECONDS = number(0, 3600)
_ONLY_STATE = answer_object({"state": ref("TrainerState")})

SCHEMAS: dict[str, JsonSchema] = {
    "TrainerState": answer_object(
        {
            "trainer": nullable(text()),
            "published": integer(),
            "leased": integer(),
            "num_running": integer(low=0),
            "num_finished": integer(low=0),
            "rolling_s": number(low=0),
            "capacity": nullable(integer(low=0)),
            "statuses": _COUNTS,
            "drops": _COUNTS,
        }
    ),
    "Publish": closed_object(
        {"step": _VERSION}
        | optional(
            trainer=NAME,
            incarnation=integer(0, _MAX_COUNT),
            batch_answers=integer(1, _MAX_COUNT),
            max_staleness=integer(0, _MAX_COUNT),
        ),
        ["step"],
    ),
    "Lease": closed_object(
        {"step": _STEP}
        | optional(
            trainer=NAME,
            num_groups=integer(1, _MAX_COUNT),
            num_trajectories=integer(1, _MAX_COUNT),
            wait_s=_SECONDS,
            straggler_wait_s=_SECONDS,
            records={"type": "boolean"},
        ),
        ["step"],
    ),
    "Leased": answer_object(
        {"step": integer(), "groups": list_of({"type": "object"}), "state": ref("TrainerState")},
    ),
    "Acknowledge": closed_object(
        {"step": _STEP, "checkpoint": text()} | optional(trainer=NAME), ["step", "checkpoint"]
    ),
    "Return": closed_object(
        {"after_step": _VERSION} | optional(trainer=NAME, adopt={"type": "boolean"}), ["after_step"]
    ),
    "Drop": closed_object(
        {"session_ids": list_of(NAME), "reason": one_of(*(drop.value for drop in Drop))} | optional(trainer=NAME),
        ["session_ids", "reason"],
    ),
}


def _call(name: str, summary: str, body: JsonSchema, answer: JsonSchema) -> dict[str, Any]:
    return {"post": operation(name, summary, body=body, answer=answer, key="adminKey", errors=[404, 409])}


PATHS: dict[str, Any] = {
    "/rl/publish": _call("publish", "A weight version serves now.", ref("Publish"), _ONLY_STATE),
    "/rl/lease": _call(
        "lease", "Whole groups for a train step, within the staleness bound.", ref("Lease"), ref("Leased")
    ),
    "/rl/acknowledge": _call(
        "acknowledge", "A checkpoint has these steps: what they leased is trained.", ref("Acknowledge"), _ONLY_STATE
    ),
    "/rl/return": _call(
        "return",
        "The trainer goes on from an earlier step: later leases wait again.",
        ref("Return"),
        answer_object({"num_returned": integer(low=0), "state": ref("TrainerState")}),
    ),
    "/rl/drop": _call("drop", "These sessions are not to be trained.", ref("Drop"), _ONLY_STATE),
    "/rl/status": _call(
        "status",
        "Where the gateway stands.",
        closed_object({}),
        answer_object({"state": ref("TrainerState"), "stats": {"type": "object"}}),
    ),
}
