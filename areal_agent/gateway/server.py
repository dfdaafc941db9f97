"""The gateway's listening socket: each request passes the host check, then the app.

Every failure, also an unknown path or an unexpected exception, is answered with OpenAI's error object.

aiohttp limits the size and the time of request heads. `Connection` adds what it lacks: a client that stops reading its
answer is disconnected, and nothing of an answer is queued behind bytes that a client does not take, so a slow client
costs no more memory than the piece being written. Input that is not HTTP gets an error object, too.
"""

import asyncio
import errno
import logging
import re
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, cast

import orjson
from aiohttp import web

from areal_agent.errors import ConfigError, DiskFull, EngineError, EngineRejected, EngineUnreachable, RequestError
from areal_agent.gateway.auth import HostCheck, without_keys
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.metrics import Counters
from areal_agent.process import allow_many_connections

logger = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

UNREAD_BODY_STATUSES = (408, 413, 415)
"""The statuses of requests whose body was not read to its end; the connection cannot be used again."""

ENGINE_RETRY_S = 1
"""Seconds until a client may retry after the engine was unreachable or overloaded."""

LINGER_S = 1.0
"""Seconds for which an unread body is discarded before the connection closes, so that its client sees the answer."""

SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds that requests in flight get when the gateway closes."""

BACKLOG = 4096
"""The number of connections that may wait to be accepted: a whole batch of rollouts starts at once."""


ANTHROPIC_PATH = re.compile("/+(v1/+)?messages(/|$)")

DONE = b"data: [DONE]\n\n"
"""The end of a stream of completions."""


class Connection(web.RequestHandler):
    """One client's connection, as an asyncio protocol."""

    __slots__ = ("_counters", "_num_untaken", "_stall_check", "_stall_timeout_s", "_wire")

    def __init__(self, manager: "Connections", *, counters: Counters, limits: Limits) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_timeout_s,
            lingering_time=LINGER_S,
            auto_decompress=False,  # a small compressed body must not become a large one
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own way to have none
        )
        self._counters = counters
        self._stall_timeout_s = limits.stall_timeout_s
        self._stall_check: asyncio.TimerHandle | None = None
        self._num_untaken = 0  # bytes in the write buffer at the last check
        self._wire: asyncio.Transport | None = None  # stays set while closing, when `transport` is None already

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast("asyncio.Transport", transport)  # uvloop's transport is one without being a subclass
        wire.set_write_buffer_limits(high=0)
        self._wire = wire
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_stall_check()
        self._wire = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._counters.received_bytes += len(data)
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_for_stall()

    def resume_writing(self) -> None:
        self._stop_stall_check()
        super().resume_writing()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        finished = await super().finish_response(request, resp, start_time)
        self._counters.sent_bytes += request.writer.output_size
        return finished

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer input that is not HTTP. It is the client's fault, so it is not logged."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        self._counters.errors[status] += 1
        reply = error_reply(RequestError(f"this is not HTTP: {message or exc}", code="bad_http"))
        reply.force_close()
        return reply

    def _watch_for_stall(self) -> None:
        if self._wire is not None:
            self._num_untaken = self._wire.get_write_buffer_size()
            self._stall_check = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._check_stall)

    def _check_stall(self) -> None:
        if self._wire is None:
            return
        if self._wire.get_write_buffer_size() < self._num_untaken:
            self._watch_for_stall()
        else:  # close at once, and let the kernel discard what it still holds for this client
            wire = self._wire
            wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wire.abort()

    def _stop_stall_check(self) -> None:
        if self._stall_check is not None:
            self._stall_check.cancel()
            self._stall_check = None


class Connections(web.Server):
    """Makes a `Connection` for every client; aiohttp keeps them."""

    def __init__(self, handler: Callable[[Any], Any], *, like: web.Server, counters: Counters, limits: Limits) -> None:
        super().__init__(handler, request_factory=like.request_factory, handler_cancellation=like.handler_cancellation)
        self._counters = counters
        self._limits = limits

    def __call__(self) -> Connection:
        return Connection(self, counters=self._counters, limits=self._limits)


class ServedGateway:
    """A gateway that listens at `base_url` until `aclose`."""

    def __init__(self, runners: Iterable[web.BaseRunner], base_url: str) -> None:
        self.base_url = base_url
        self._runners = tuple(runners)

    async def aclose(self) -> None:
        """Stop listening and abort what is in flight. May be called again."""
        for runner in self._runners:
            await runner.cleanup()


async def serve_app(
    app: web.Application, host: str, port: int, *, limits: Limits, counters: Counters, allowed_hosts: Iterable[str] = ()
) -> ServedGateway:
    """Listen on `host` and `port`; port 0 picks a free one. Raises ConfigError when that fails.

    `handler_cancellation` stops the engine when a client hangs up.
    """
    allow_many_connections()
    app_runner = web.AppRunner(app, handler_cancellation=True)
    await app_runner.setup()
    assert app_runner.server is not None  # setup made it
    handle, hosts = app_runner.server.request_handler, HostCheck((host, *allowed_hosts))

    async def entrance(request: web.BaseRequest) -> web.StreamResponse:
        hosts.check(request)
        path = request.path
        if "//" in path or (path.endswith("/") and path != "/"):  # a base URL with a slash at its end
            path = re.sub("/+", "/", path).rstrip("/") or "/"
            request = request.clone(rel_url=request.rel_url.with_path(path).with_query(request.rel_url.query))
        return await handle(request)

    handler = error_boundary(entrance, counters.errors)
    server = Connections(handler, like=app_runner.server, counters=counters, limits=limits)
    runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    served = (runner, app_runner)
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except OSError as error:
        await ServedGateway(served, "").aclose()
        in_use = error.errno == errno.EADDRINUSE
        cause = f"port {port} on {host} is in use" if in_use else f"cannot listen on {host} port {port}: {error}"
        raise ConfigError(f"{cause}; choose another port, or 0 for any free one") from error
    shown_host = f"[{host}]" if ":" in host else host
    return ServedGateway(served, f"http://{shown_host}:{runner.addresses[0][1]}")


# ------------------------------------------------------------------------------------------------------- replies


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


def anthropic_error(fault: RequestError) -> dict[str, Any]:
    """Return Anthropic's error object, with `param` and `code` as in OpenAI's.

    Claude Code shortens its conversation when a message begins as this one does for a full context.
    """
    is_full = fault.code == "context_length_exceeded"
    message = f"prompt is too long: {fault.message}" if is_full else fault.message
    type_ = _ANTHROPIC_TYPES.get(fault.status, _error_type(fault.status))
    return {"type": "error", "error": {"type": type_, "message": message, "param": fault.param, "code": fault.code}}


_ANTHROPIC_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}


def error_reply(fault: RequestError, path: str = "") -> web.Response:
    """Return an error in the form of the protocol that `path` belongs to."""
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    body = anthropic_error(fault) if ANTHROPIC_PATH.match(path) else error_object(fault)
    reply = json_reply(body, status=fault.status, headers=headers)
    if fault.status in UNREAD_BODY_STATUSES:
        reply.force_close()
    return reply


def error_boundary(handle: Handler, errors: Counter[int]) -> Handler:
    """Wrap a handler so that its failures become error objects, counted in `errors` by status."""

    async def boundary(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except Exception as error:  # boundary: whatever fails, the agent gets an error that it understands
            if request.transport is None or request.transport.is_closing():
                return web.Response()  # the client is gone, which is no error for the log
            fault = as_request_error(error, request)
            errors[fault.status] += 1
            if request.writer.output_size:  # a part of another answer was sent already
                raise ConnectionResetError("an answer broke off") from error
            reply = error_reply(fault, request.path)
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
            bases = "OpenAI's clients take the gateway's URL with /v1, Anthropic's and calls of /rl without"
            return RequestError(f"{call}: no such path; {bases}; GET /openapi.json lists every path", status=404)
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
        case DiskFull():
            logger.info("%s: %s", without_keys(call, headers), error)
            return RequestError(str(error), status=507, code="disk_full")
        case _:
            logger.error("%s failed", without_keys(call, headers), exc_info=error)
            return RequestError(f"internal error ({type(error).__name__}); see the gateway's log", status=500)


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )
