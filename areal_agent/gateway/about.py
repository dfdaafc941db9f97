"""What a gateway says of itself: its model, its health, its metrics, and the description of its HTTP."""

from collections.abc import Callable

from aiohttp import web

from areal_agent.gateway.callers import Callers
from areal_agent.gateway.hosts import is_loopback
from areal_agent.gateway.metrics import Metrics
from areal_agent.gateway.openapi.document import openapi_document
from areal_agent.gateway.replies import json_reply
from areal_agent.gateway.stats import GatewayStats
from areal_agent.gateway.traffic import Traffic


class About:
    """The handlers of calls that change nothing."""

    def __init__(
        self,
        *,
        model_name: str,
        callers: Callers,
        traffic: Traffic,
        stats: Callable[[], GatewayStats],
        metrics: Metrics,
        is_leased_from: bool,
    ) -> None:
        self._model_name = model_name
        self._callers = callers
        self._traffic = traffic
        self._stats = stats
        self._metrics = metrics
        self._is_leased_from = is_leased_from

    async def models(self, request: web.Request) -> web.Response:
        """The one model, for whoever has a key."""
        self._callers.require_any(request)
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "areal_agent"}
        return json_reply({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        """For anybody: it names nothing but the model."""
        stats = self._stats()
        return json_reply(
            {
                "status": "draining" if self._traffic.is_draining else "ok",
                "model": self._model_name,
                "open_sessions": stats.num_open_sessions,
                "engine_requests": stats.num_engine_requests,
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """For this machine; from elsewhere it takes the admin key."""
        if request.transport is None or not is_loopback(request.transport.get_extra_info("peername")):
            self._callers.require_admin(request)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": Metrics.CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        """For anybody: it tells nothing of this gateway but what it may be asked."""
        return json_reply(openapi_document(is_leased_from=self._is_leased_from))
