"""JSON replies, and OpenAI's error object for every failure, including unknown paths and unexpected exceptions."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, RequestError
from areal_agent.gateway.auth import without_keys

logger = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

UNREAD_BODY_STATUSES = (408, 413, 415)
"""The statuses of requests whose body was not read to its end; the connection cannot be used again."""

ENGINE_RETRY_S = 1
"""Seconds until a client may retry after the engine was unreachable or overloaded."""


def json_reply(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def error_object(fault: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object, for an answer or for an event of a stream."""
    return {
        "error": {"message": fault.message, "type": _error_type(fault.status), "param": fault.param, "code": fault.code}
    }


def error_reply(fault: RequestError) -> web.Response:
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    reply = json_reply(error_object(fault), status=fault.status, headers=headers)
    if fault.status in UNREAD_BODY_STATUSES:
        reply.force_close()
    return reply


def error_boundary(handle: Handler, on_error: Callable[[int], None]) -> Handler:
    """Wrap a handler so that its failures become error objects; `on_error` gets the status of each."""

    async def boundary(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except Exception as error:  # boundary: whatever fails, the agent gets an error that it understands
            if request.transport is None or request.transport.is_closing():
                return web.Response()  # the client is gone, which is no error for the log
            fault = as_request_error(error, request)
            on_error(fault.status)
            if request.writer.output_size:  # a part of another answer was sent already
                raise ConnectionResetError("an answer broke off") from error
            reply = error_reply(fault)
            if isinstance(error, web.HTTPMethodNotAllowed):
                reply.headers["Allow"] = error.headers["Allow"]
            return reply

    return boundary


def as_request_error(error: Exception, request: web.BaseRequest) -> RequestError:
    """Turn an exception into the error for the agent, without keys. Internal details are logged instead."""
    fault = _fault(error, f"{request.method} {request.rel_url.raw_path:.200}", request.headers)
    fault.message = without_keys(fault.message, request.headers)
    fault.param = None if fault.param is None else without_keys(fault.param, request.headers)
    return fault


def _fault(error: Exception, call: str, headers: Mapping[str, str]) -> RequestError:
    match error:
        case RequestError():
            return error
        case web.HTTPNotFound():
            return RequestError(f"{call}: this path does not exist; GET /openapi.json lists every path", status=404)
        case web.HTTPMethodNotAllowed():
            methods = ", ".join(sorted(error.allowed_methods))
            return RequestError(f"{call}: this path only accepts {methods}", status=405)
        case web.HTTPException():
            return RequestError(f"{call}: {error.reason}", status=error.status)
        case web.RequestPayloadError() | web.PayloadAccessError():
            return RequestError(f"the body is incomplete or not valid HTTP: {error}", code="bad_http")
        case RecursionError():
            return RequestError("the body is nested too deeply")
        case EngineRejected():
            return RequestError(f"the engine refused the request: {error}", code="engine_rejected")
        case EngineError():
            logger.warning("%s: %s", without_keys(call, headers), error)
            status, retry_after_s = (503, ENGINE_RETRY_S) if isinstance(error, EngineUnreachable) else (502, None)
            return RequestError(
                f"the engine failed: {error}", status=status, code="engine_failed", retry_after_s=retry_after_s
            )
        case _:
            logger.error("%s failed", without_keys(call, headers), exc_info=error)
            return RequestError(f"internal error ({type(error).__name__}); see the gateway's log", status=500)


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )
