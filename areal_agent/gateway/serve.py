"""The listening socket of a gateway, and what a request passes on its way in: host, then app, then error objects."""

import errno
from collections.abc import Iterable

from aiohttp import web

from areal_agent.errors import ConfigError
from areal_agent.gateway.connection import Connections
from areal_agent.gateway.hosts import HostCheck
from areal_agent.gateway.limits import Limits
from areal_agent.gateway.replies import Handler, error_boundary
from areal_agent.gateway.stats import Counters
from areal_agent.process import allow_many_connections

SHUTDOWN_TIMEOUT_S = 2.0
"""How long requests in flight may take to end when the gateway closes."""

BACKLOG = 4096
"""Connections that may wait to be accepted: a whole batch of rollouts starts at once."""


class ServedGateway:
    """A gateway that listens at `base_url`, until `aclose`."""

    def __init__(self, runners: Iterable[web.BaseRunner], base_url: str) -> None:
        self.base_url = base_url
        self._runners = tuple(runners)

    async def aclose(self) -> None:
        """Stop listening and abort what is in flight. Harmless when done before."""
        for runner in self._runners:
            await runner.cleanup()


async def serve_app(
    app: web.Application,
    host: str,
    port: int,
    *,
    limits: Limits,
    counters: Counters,
    allowed_hosts: Iterable[str] = (),
) -> ServedGateway:
    """Listen; port 0 picks a free one. Raises ConfigError when that is not possible.

    `handler_cancellation`: who hangs up must not keep the engine sampling for nobody.
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
