"""The trainer's client of a gateway that stands alone (`python -m areal_agent.gateway`).

Every call may be repeated: when the gateway is restarted meanwhile, only time is lost.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import orjson

from areal_agent.errors import GatewayError
from areal_agent.gateway.online.wire import (
    GatewayStatus,
    LeaseReply,
    State,
    decode_lease,
    decode_state,
    decode_status,
    records_of,
)
from areal_agent.tokens.loss_rule import LossRule, TrainRoots
from areal_agent.types import Drop, JsonObject, RolloutBatch

logger = logging.getLogger(__name__)

RETRY_S = 0.5
PATIENCE_S = 300.0
ANSWER_S = 60.0
"""The time that an answer may take beyond the wait that was asked for."""


class OnlineGateway:
    """A gateway that stands alone, as a trainer sees it. Use it from one event loop, and `aclose` it.

    ::

        gateway = OnlineGateway("http://127.0.0.1:8000", admin_key, trainer="run-1")
        await gateway.give_back(after_step=0, adopt=True)             # takes it over if another trainer has it
        await gateway.publish(0, batch_answers=32, max_staleness=2)
        batch = await gateway.lease(1, num_groups=8, wait_s=60)       # a RolloutBatch, or None
        ...                                                           # train, push
        await gateway.publish(1)
        await gateway.acknowledge(1, "checkpoints/step_000001")       # the checkpoint is safe
    """

    def __init__(self, url: str, admin_key: str, *, trainer: str | None = None, patience_s: float = PATIENCE_S) -> None:
        self.url = url.rstrip("/")
        self._trainer = trainer  # the trainer's name at the gateway, the same over its restarts
        self._headers = {"Authorization": f"Bearer {admin_key}", "Content-Type": "application/json"}
        self._patience_s = patience_s  # the longest time that the gateway may be gone
        self._session: aiohttp.ClientSession | None = None

    async def lease(
        self,
        step: int,
        *,
        num_groups: int | None = None,
        num_trajectories: int | None = None,
        wait_s: float = 0.0,
        straggler_wait_s: float = 0.0,
        train_roots: TrainRoots = TrainRoots.ALL,
    ) -> tuple[RolloutBatch | None, State]:
        """Lease whole groups for a train step, by number of groups or of trajectories; None when too few came in time.

        Leasing the same step again returns the same batch, until it is acknowledged or given back.
        """
        asked = {"step": step, "trainer": self._trainer, "num_groups": num_groups, "num_trajectories": num_trajectories}
        asked |= {"wait_s": wait_s, "straggler_wait_s": straggler_wait_s, "records": False}
        asked |= {"train_roots": train_roots.value}
        body = await self._post("/rl/lease", asked, wait_s=wait_s)
        return await asyncio.to_thread(_read_lease, body, LossRule(roots=train_roots))

    async def publish(
        self,
        step: int,
        *,
        incarnation: int | None = None,
        batch_answers: int | None = None,
        max_staleness: int | None = None,
    ) -> State:
        """Publish version `step`: its incarnation, and optionally a new staleness bound from the other two."""
        body = {"step": step, "trainer": self._trainer, "incarnation": incarnation}
        body |= {"batch_answers": batch_answers, "max_staleness": max_staleness}
        return await self._state("/rl/publish", body)

    async def acknowledge(self, step: int, checkpoint: str) -> State:
        """Report that a checkpoint with every step up to `step` is safe: what was leased for those is trained."""
        return await self._state("/rl/acknowledge", {"step": step, "trainer": self._trainer, "checkpoint": checkpoint})

    async def give_back(self, after_step: int, *, adopt: bool = False) -> int:
        """Go on from the checkpoint of `after_step`: later leases wait again. Return how many trajectories those are.

        With `adopt`, also take over from another trainer: what that one trained stays trained. Where this trainer lost
        its own later checkpoints, their trajectories wait again.
        """
        body = {"after_step": after_step, "trainer": self._trainer, "adopt": adopt}
        return int((await self._post("/rl/return", body))["num_returned"])

    async def drop(self, session_ids: Sequence[str], reason: Drop) -> State:
        """Drop waiting rollouts: they will not be trained."""
        body = {"session_ids": list(session_ids), "reason": reason.value, "trainer": self._trainer}
        return await self._state("/rl/drop", body)

    async def status(self) -> GatewayStatus:
        return decode_status(await self._post("/rl/status", {}))

    async def check(self) -> None:
        """Call once. Raises GatewayError when no gateway answers, or it refuses the key or a trainer's calls."""
        try:
            await self._post_once("/rl/status", {}, 0.0)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = str(error).replace(" ssl:default", "") or type(error).__name__
            raise GatewayError(
                f"no gateway answers at {self.url}: {cause}; start one with python -m areal_agent.gateway"
            ) from error

    async def aclose(self) -> None:
        """Close the connections. Harmless when done before."""
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------------------------------------- internals

    async def _state(self, path: str, body: JsonObject) -> State:
        return decode_state((await self._post(path, body))["state"])

    async def _post(self, path: str, body: JsonObject, *, wait_s: float = 0.0) -> JsonObject:
        """Repeat a call until it is answered. Raises GatewayError when refused, or the gateway is gone for too long."""
        give_up_s = time.monotonic() + self._patience_s
        is_gone = False
        while True:
            try:
                return await self._post_once(path, body, wait_s)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                cause = str(error).replace(" ssl:default", "") or type(error).__name__
                if time.monotonic() >= give_up_s:
                    raise GatewayError(
                        f"the gateway at {self.url} has not answered for {self._patience_s:g} s: {cause}; start it "
                        "again on its ledger, and resume"
                    ) from error
                if not is_gone:
                    logger.warning("the gateway at %s does not answer (%s); asking until it does", self.url, cause)
                is_gone = True
            await asyncio.sleep(RETRY_S)

    async def _post_once(self, path: str, body: JsonObject, wait_s: float) -> JsonObject:
        timeout = aiohttp.ClientTimeout(total=wait_s + ANSWER_S)
        self._session = self._session or aiohttp.ClientSession(trust_env=False)
        async with self._session.post(
            self.url + path, data=orjson.dumps(body), headers=self._headers, timeout=timeout, allow_redirects=False
        ) as response:
            payload = await response.read()
        if response.status == 503:  # it is closing
            raise aiohttp.ServerConnectionError(_message(payload))
        if response.status != 200:
            raise GatewayError(f"{self.url}{path} was answered with {response.status}: {_message(payload)}")
        return cast("JsonObject", orjson.loads(payload))


def _read_lease(body: JsonObject, rule: LossRule) -> tuple[RolloutBatch | None, State]:
    reply: LeaseReply = decode_lease(body)
    if not reply.groups:
        return None, reply.state
    return RolloutBatch(step=reply.step, groups=reply.groups, records=records_of(reply, rule)), reply.state


def _message(payload: bytes) -> str:
    try:
        body: Any = orjson.loads(payload)
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return payload[:200].decode(errors="replace")
