"""The endpoints of a trainer: publish, lease, acknowledge, return, drop, status. All take the admin key."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from areal_agent.gateway.fields import refuse_unknown
from areal_agent.gateway.online.bodies import (
    AcknowledgeRequest,
    DropRequest,
    LeaseRequest,
    PublishRequest,
    ReturnRequest,
)
from areal_agent.gateway.online.consumer import Consumer
from areal_agent.gateway.online.wire import GatewayStatus, encode_lease, encode_status
from areal_agent.gateway.replies import json_reply
from areal_agent.gateway.stats import GatewayStats
from areal_agent.types import JsonObject

TrainerHandler = Callable[[JsonObject], Awaitable[web.Response]]


class TrainerCalls:
    """Handlers by path; each is given the body of a request that came with the admin key."""

    def __init__(self, consumer: Consumer, stats: Callable[[], GatewayStats]) -> None:
        self._consumer = consumer
        self._stats = stats

    def handlers(self) -> Mapping[str, TrainerHandler]:
        return {
            "/rl/publish": self._publish,
            "/rl/lease": self._lease,
            "/rl/acknowledge": self._acknowledge,
            "/rl/return": self._return,
            "/rl/drop": self._drop,
            "/rl/status": self._status,
        }

    async def _publish(self, body: JsonObject) -> web.Response:
        await self._consumer.publish(PublishRequest.read(body))
        return self._state()

    async def _lease(self, body: JsonObject) -> web.Response:
        request = LeaseRequest.read(body)
        reply = await self._consumer.lease(request)
        payload = await encode_lease(reply, with_records=request.wants_records)
        return web.Response(body=payload, content_type="application/json")

    async def _acknowledge(self, body: JsonObject) -> web.Response:
        await self._consumer.acknowledge(AcknowledgeRequest.read(body))
        return self._state()

    async def _return(self, body: JsonObject) -> web.Response:
        num_returned = await self._consumer.give_back(ReturnRequest.read(body))
        return json_reply({"num_returned": num_returned, "state": self._consumer.state()})

    async def _drop(self, body: JsonObject) -> web.Response:
        await self._consumer.drop(DropRequest.read(body))
        return self._state()

    async def _status(self, body: JsonObject) -> web.Response:
        refuse_unknown(body, ())
        status = GatewayStatus(state=self._consumer.state(), stats=self._stats())
        return web.Response(body=encode_status(status), content_type="application/json")

    def _state(self) -> web.Response:
        return json_reply({"state": self._consumer.state()})
