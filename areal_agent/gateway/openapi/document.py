"""The whole description, put together from its parts."""

from typing import Any

from areal_agent.gateway.openapi import about, agents, control, trainer
from areal_agent.gateway.openapi.parts import ERRORS, answer_object, nullable, ref, text

_ERROR = answer_object(
    {
        "error": answer_object(
            {
                "message": text(min_length=1),
                "type": text(min_length=1),
                "param": nullable(text()),
                "code": nullable(text()),
            }
        )
    }
)

_KEYS = {
    "sessionKey": "The key that /rl/start_session gave: it reaches its own session and nothing else.",
    "adminKey": "The key that the gateway was started with.",
    "anyKey": "A session's key, or the admin's.",
}


def openapi_document(*, is_leased_from: bool) -> dict[str, Any]:
    """OpenAPI 3.1, with a trainer's calls where the gateway has them.

    What is under `/v1` is also served without it, for clients that leave it out.
    """
    of_trainers: dict[str, Any] = trainer.PATHS if is_leased_from else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "areal_agent gateway",
            "version": "1",
            "description": "OpenAI's API before one model, recording every token; and the calls that start, reward "
            "and end its sessions. A key may also come in the header `api-key` or `x-api-key`. Every error is "
            "OpenAI's error object.",
        },
        "paths": with_short_paths(agents.PATHS | about.PATHS) | control.PATHS | of_trainers,
        "components": {
            "schemas": {"Error": _ERROR} | agents.SCHEMAS | control.SCHEMAS | trainer.SCHEMAS | about.SCHEMAS,
            "responses": {str(status): _error_response(status, why) for status, why in ERRORS.items()},
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": text} for name, text in _KEYS.items()
            },
        },
    }


def with_short_paths(paths: dict[str, Any]) -> dict[str, Any]:
    """The same paths, and those under `/v1` also without it."""
    short = {path.removeprefix("/v1"): _renamed(item) for path, item in paths.items() if path.startswith("/v1/")}
    return paths | short


def _renamed(item: dict[str, Any]) -> dict[str, Any]:
    return {
        method: operation | {"operationId": f"{operation['operationId']}Short"} for method, operation in item.items()
    }


def _error_response(status: int, why: str) -> dict[str, Any]:
    response: dict[str, Any] = {"description": why, "content": {"application/json": {"schema": ref("Error")}}}
    if status in (429, 503):
        response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return response
