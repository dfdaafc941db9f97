"""Answers as JSON, and every failure as OpenAI's error object: also an unknown path, and what nobody foresaw."""

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
"""Answers to a body that was not read to its end: nothing more can be said on that connection."""

ENGINE_RETRY_S = 1
"""When an engine that does not answer, or has too much to do, may be asked again."""


def json_reply(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def error_object(fault: RequestError) -> dict[str, Any]:
    """As OpenAI says it, in an answer of its own or in an event of a stream."""
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
    """A handler that turns the failures of another into error objects; `on_error` is told the status."""

    async def boundary(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except Exception as error:  # the boundary: whatever fails, the agent gets an error that it understands
            if request.transport is None or request.transport.is_closing():
                return web.Response()  # nobody is left to hear of it, and it is no error for the log
            fault = as_request_error(error, request)
            on_error(fault.status)
            if request.writer.output_size:  # a part of another answer has left already
                raise ConnectionResetError("an answer broke off") from error
            reply = error_reply(fault)
            if isinstance(error, web.HTTPMethodNotAllowed):
                reply.headers["Allow"] = error.headers["Allow"]
            return reply

    return boundary


def as_request_error(error: Exception, request: web.BaseRequest) -> RequestError:
    """A failure as its agent is told it: without keys, and without what is only for the log, where that goes."""
    fault = _fault(error, f"{request.method} {request.rel_url.raw_path:.200}", request.headers)
    fault.message = without_keys(fault.message, request.headers)
    fault.param = None if fault.param is None else without_keys(fault.param, request.headers)
    return fault


def _fault(error: Exception, call: str, headers: Mapping[str, str]) -> RequestError:
    match error:
        case RequestError():
            return error
        case web.HTTPNotFound():
            return RequestError(f"{call}: nothing is served there; GET /openapi.json lists every path", status=404)
        case web.HTTPMethodNotAllowed():
            methods = ", ".join(sorted(error.allowed_methods))
            return RequestError(f"{call}: this path takes {methods}", status=405)
        case web.HTTPException():
            return RequestError(f"{call}: {error.reason}", status=error.status)
        case web.RequestPayloadError() | web.PayloadAccessError():
            return RequestError(f"the body broke off or is no HTTP: {error}", code="bad_http")
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
