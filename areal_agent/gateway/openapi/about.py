"""What the gateway says of itself: models, health, metrics, and this description."""

from typing import Any

from areal_agent.gateway.openapi.parts import JsonSchema, answer_object, integer, list_of, one_of, operation, ref, text

SCHEMAS: dict[str, JsonSchema] = {
    "Model": answer_object(
        {"id": text(), "object": {"const": "model"}, "created": integer(), "owned_by": text()},
    ),
    "Models": answer_object({"object": {"const": "list"}, "data": list_of(ref("Model"))}),
    "Health": answer_object(
        {
            "status": one_of("ok", "draining"),
            "model": text(),
            "open_sessions": integer(low=0),
            "engine_requests": integer(low=0),
        }
    ),
}

_MODELS = operation("listModels", "The one model that this gateway stands before.", answer=ref("Models"), key="anyKey")

PATHS: dict[str, Any] = {
    "/v1/models": {"get": _MODELS},
    "/health": {"get": operation("health", "Whether it serves, and how busy it is.", answer=ref("Health"), key=None)},
    "/metrics": {
        "get": operation(
            "metrics",
            "Its counters in Prometheus' text format. From another machine: with the admin key.",
            answer=text(),
            key=None,
            errors=[401],
            is_text=True,
        )
    },
    "/openapi.json": {
        "get": operation("describe", "This description.", answer={"type": "object"}, key=None),
    },
}
