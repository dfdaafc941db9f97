"""Answers as JSON, and every failure as OpenAI's error object: also an unknown path, and what nobody foresaw."""

import logging
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, RequestError
from areal_agent.types import JsonObject

logger = logging.getLogger(__name__)


def json_reply(data: Any, *, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY), status=status, content_type="application/json"
    )


async def read_body(request: web.Request) -> JsonObject:
    """The JSON object that a request carries; no body is an empty one."""
    payload = await request.read()
    if not payload:
        return {}
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON ({error}); NaN and Infinity are none either") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is {body!r:.80}; it must be a JSON object")
    return body


def error_boundary(on_error: Callable[[int], None]) -> Middleware:
    """The middleware that turns failures into error objects; `on_error` is told the status."""

    @web.middleware
    async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as error:  # the boundary: whatever fails, the agent gets an error that it understands
            fault = _as_request_error(error, request)
            on_error(fault.status)
            return _error_reply(fault)

    return boundary


def _as_request_error(error: Exception, request: web.Request) -> RequestError:
    match error:
        case RequestError():
            return error
        case web.HTTPRequestEntityTooLarge():
            return RequestError(f"the body is too large: {error.text}", status=413)
        case web.HTTPException():
            return RequestError(f"{request.method} {request.path}: {error.reason}", status=error.status)
        case RecursionError():
            return RequestError("the body is nested too deeply")
        case EngineRejected():
            return RequestError(f"the engine refused the request: {error}", code="engine_rejected")
        case EngineError():
            logger.warning("%s %s: %s", request.method, request.path, error)
            status = 503 if isinstance(error, EngineUnreachable) else 502
            return RequestError(f"the engine failed: {error}", status=status, code="engine_failed")
        case _:
            logger.error("%s %s failed", request.method, request.path, exc_info=error)
            return RequestError(f"internal error ({type(error).__name__}); see the gateway's log", status=500)


def _error_reply(fault: RequestError) -> web.Response:
    error = {"message": fault.message, "type": _error_type(fault.status), "param": fault.param, "code": fault.code}
    return json_reply({"error": error}, status=fault.status)


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error"}.get(status, "invalid_request_error")
