"""The calls that start, reward, end and export sessions."""

from typing import Any

from areal_agent.gateway.control import MAX_GROUP_SIZE
from areal_agent.gateway.openapi.parts import (
    NAME,
    JsonSchema,
    answer_object,
    closed_object,
    integer,
    list_of,
    number,
    one_of,
    operation,
    optional,
    ref,
    text,
)
from areal_agent.gateway.openapi.sampling import WISHES
from areal_agent.types import MAX_REWARD, SessionPurpose, Status

_STATUS = one_of(*(status.value for status in Status))

_WISHES = closed_object(WISHES)

SCHEMAS: dict[str, JsonSchema] = {
    "StartSession": closed_object(
        {"task_id": NAME}
        | optional(
            group_id=NAME,
            session_id=NAME,
            purpose=one_of(*(purpose.value for purpose in SessionPurpose)),
            seed=integer(0, 2**63 - 1),
            sampling=_WISHES,
            group_size=integer(1, MAX_GROUP_SIZE) | {"description": "Only where a trainer leases from this gateway."},
            truncate={"type": "boolean", "description": "A full context is an empty answer, not an error."},
        ),
        ["task_id"],
    ),
    "StartedSession": answer_object(
        {"session_id": NAME, "api_key": text(1), "base_url": text(1), "anthropic_base_url": text(1)}
    ),
    "SetReward": closed_object(
        {"reward": {"anyOf": [number(-MAX_REWARD, MAX_REWARD), {"type": "boolean"}]}}
        | optional(interaction_id=NAME, name=NAME),
        ["reward"],
    ),
    "RewardedSession": answer_object({"session_id": NAME}),
    "EndSession": closed_object(
        optional(status=_STATUS, error=text(), logged={"type": "object", "description": "At most 64 levels deep."})
    ),
    "EndedSession": answer_object(
        {
            "session_id": NAME,
            "status": _STATUS,
            "num_turns": integer(low=0),
            "num_sampled_tokens": integer(low=0),
        }
    ),
    "ExportTrajectories": closed_object({"session_id": NAME}, ["session_id"]),
    "ExportedTrajectory": answer_object(
        {"trajectory": {"type": "object"}, "records": list_of({"type": "object"})},
    ),
}

PATHS: dict[str, Any] = {
    "/rl/start_session": {
        "post": operation(
            "startSession",
            "Start a rollout: its key and its URL.",
            body=ref("StartSession"),
            answer=ref("StartedSession"),
            key="adminKey",
            errors=[409, 429, 503],
        )
    },
    "/rl/set_reward": {
        "post": operation(
            "setReward",
            "What it earned: at its end, for one completion (`interaction_id`), or a part for metrics (`name`).",
            body=ref("SetReward"),
            answer=ref("RewardedSession"),
            key="sessionKey",
            errors=[404, 409, 429],
        )
    },
    "/rl/end_session": {
        "post": operation(
            "endSession",
            "End it: calls in flight are aborted, and what was sampled is kept. Ended again, it is the end that was.",
            body=ref("EndSession"),
            answer=ref("EndedSession"),
            key="sessionKey",
            errors=[404, 409, 429],
        )
    },
    "/export_trajectories": {
        "post": operation(
            "exportTrajectories",
            "An ended session, token by token, and as the trainer eats it.",
            body=ref("ExportTrajectories"),
            answer=ref("ExportedTrajectory"),
            key="adminKey",
            errors=[404, 409],
        )
    },
}
