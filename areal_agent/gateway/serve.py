"""The listening socket of a gateway."""

import errno

from aiohttp import web

from areal_agent.errors import ConfigError

SHUTDOWN_TIMEOUT_S = 2.0
"""How long requests in flight may take to end when the gateway closes."""


class ServedGateway:
    """A gateway that listens at `base_url`, until `aclose`."""

    def __init__(self, runner: web.AppRunner, base_url: str) -> None:
        self.base_url = base_url
        self._runner = runner

    async def aclose(self) -> None:
        """Stop listening and abort what is in flight. Harmless when done before."""
        await self._runner.cleanup()


async def serve_app(app: web.Application, host: str, port: int) -> ServedGateway:
    """Listen; port 0 picks a free one. Raises ConfigError when that is not possible.

    `handler_cancellation`: who hangs up must not keep the engine sampling for nobody.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        in_use = error.errno == errno.EADDRINUSE
        cause = f"port {port} on {host} is in use" if in_use else f"cannot listen on {host} port {port}: {error}"
        raise ConfigError(f"{cause}; choose another port, or 0 for any free one") from error
    address = runner.addresses[0]
    shown_host = f"[{host}]" if ":" in host else host
    return ServedGateway(runner, f"http://{shown_host}:{address[1]}")
