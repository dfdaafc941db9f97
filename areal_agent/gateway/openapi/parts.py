"""The pieces that descriptions are put together from: schemas, bodies, answers, errors. It knows no path."""

from collections.abc import Iterable, Mapping
from typing import Any

JsonSchema = dict[str, Any]

EVENT: JsonSchema = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, an error object, or [DONE]."}},
    "required": ["data"],
}
"""One server-sent event."""

ERRORS: Mapping[int, str] = {
    400: "The request is wrong: `param` names where. Also: not HTTP, not JSON, more than the context holds.",
    401: "No API key, or one that nobody has.",
    403: "A key of the wrong kind, a Host that is not this gateway's, or a web page of another origin.",
    404: "There is no such model, session or path.",
    405: "The path has no such method.",
    408: "The body did not arrive in time.",
    409: "The session, or its id, is not in the state that the call needs.",
    413: "The body is larger than the gateway takes.",
    415: "The body is compressed.",
    429: "Too much at once: see `Retry-After`.",
    500: "The gateway failed.",
    502: "The engine failed.",
    503: "The engine is not there, or the gateway is closing: see `Retry-After`.",
}

OF_EVERY_CALL = (400, 403, 500)
OF_EVERY_BODY = (408, 413, 415)


def ref(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Mapping[str, Any]) -> JsonSchema:
    """Null means left out."""
    return {"anyOf": [dict(schema), {"type": "null"}]}


def optional(**properties: Mapping[str, Any]) -> dict[str, JsonSchema]:
    """Properties that may be left out, or null."""
    return {name: nullable(schema) for name, schema in properties.items()}


def closed_object(properties: Mapping[str, JsonSchema], required: Iterable[str] = ()) -> JsonSchema:
    """An object that has these properties and no other."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def answer_object(properties: Mapping[str, JsonSchema]) -> JsonSchema:
    """An object of an answer: it has all of these."""
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def text(min_length: int = 0, max_length: int | None = None) -> JsonSchema:
    bounds = {} if max_length is None else {"maxLength": max_length}
    return {"type": "string", "minLength": min_length} | bounds


NAME = text(1, 256)


def number(low: float | None = None, high: float | None = None) -> JsonSchema:
    return {"type": "number"} | _bounds(low, high)


def integer(low: int | None = None, high: int | None = None) -> JsonSchema:
    return {"type": "integer"} | _bounds(low, high)


def list_of(schema: JsonSchema, **bounds: int) -> JsonSchema:
    return {"type": "array", "items": schema} | bounds


def one_of(*values: object) -> JsonSchema:
    return {"enum": list(values)}


def operation(
    name: str,
    summary: str,
    *,
    answer: JsonSchema,
    key: str | None,
    body: JsonSchema | None = None,
    errors: Iterable[int] = (),
    is_text: bool = False,
    is_streamed: bool = False,
) -> dict[str, Any]:
    """One operation. `key` is the security scheme that it asks for; None: it asks for none."""
    statuses = {*OF_EVERY_CALL, *errors}
    if key is not None:
        statuses.add(401)
    if body is not None:
        statuses.update(OF_EVERY_BODY)
    content: dict[str, Any] = {"text/plain" if is_text else "application/json": {"schema": answer}}
    if is_streamed:
        content["text/event-stream"] = {"schema": EVENT}
    described: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "security": [] if key is None else [{key: []}],
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)},
        },
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


def _bounds(low: float | None, high: float | None) -> JsonSchema:
    return ({} if low is None else {"minimum": low}) | ({} if high is None else {"maximum": high})
