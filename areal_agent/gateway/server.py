"""The gateway's listening socket: each request passes the host check, then the app; failures become error objects.

aiohttp limits the size and the time of request heads. `Connection` adds what it lacks: a client that stops reading its
answer is disconnected, and nothing of an answer is queued behind bytes that a client does not take, so a slow client
costs no more memory than the piece being written. Input that is not HTTP gets an error object, too.
"""

import asyncio
import errno
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, cast

from aiohttp import web

from areal_agent.errors import ConfigError, RequestError
from areal_agent.gateway.auth import HostCheck
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.metrics import Counters
from areal_agent.gateway.replies import Handler, error_boundary, error_reply
from areal_agent.process import allow_many_connections

LINGER_S = 1.0
"""Seconds for which an unread body is discarded before the connection closes, so that its client sees the answer."""

SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds that requests in flight get when the gateway closes."""

BACKLOG = 4096
"""The number of connections that may wait to be accepted: a whole batch of rollouts starts at once."""


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
        else:
            self._hang_up(self._wire)

    def _hang_up(self, wire: asyncio.Transport) -> None:
        """Close at once and let the kernel discard what it still holds for this client."""
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
    handler = _entrance(app_runner.server.request_handler, HostCheck((host, *allowed_hosts)), counters)
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


def _entrance(handle: Handler, hosts: HostCheck, counters: Counters) -> Handler:
    async def entrance(request: web.BaseRequest) -> web.StreamResponse:
        hosts.check(request)
        return await handle(request)

    return error_boundary(entrance, counters.count_error)
