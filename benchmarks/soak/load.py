"""What a gateway hears: agents of three protocols, and a trainer that leases what they finish.

An agent's session has dozens of turns, half of them streamed, and a reward at its end; then the next one begins.
`Load.ended` has the answered turns of each session that was ended; the trainer takes off it what it leases. What is
left at the end was lost.
"""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from areal_agent.conformance.protocols import Chat, Messages, Responses
from areal_agent.rollout.online import OnlineGateway
from benchmarks.gateway.agents import PROTOCOLS, Agent, TurnFailed

DIALECTS = {"chat": Chat(), "responses": Responses(), "messages": Messages()}  # put the events of a stream together


@dataclass(slots=True)
class SoakAgent(Agent):
    """An agent of the gateway's benchmark that streams half of its turns, and knows its session."""

    name: str = "chat"  # of its protocol
    session_id: str = ""

    async def _send(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        is_streamed = path == self.protocol.path and random.random() < 0.5
        if is_streamed:
            body = body.removesuffix(b"}") + b',"stream":true}'
        headers = {"Content-Type": "application/json", **headers}
        async with self.http.post(self.base_url + path, data=body, headers=headers) as response:
            payload = await response.read()
        if response.status != 200 or b'"error":{' in payload:
            raise TurnFailed(f"{path} {response.status}: {payload[-200:]!r}")
        if is_streamed:
            data = [line[5:].strip() for line in payload.splitlines() if line.startswith(b"data:")]
            return DIALECTS[self.name].assembled([orjson.loads(one) for one in data if one != b"[DONE]"])
        answer = orjson.loads(payload)
        self.session_id = answer.get("session_id", self.session_id)
        return answer


@dataclass(kw_only=True)
class Load:
    """All agents and their trainer."""

    base_url: str
    admin_key: str
    text: str  # of which the agents' messages are made
    num_sessions: int
    turns_per_s: float
    mean_turns: int  # of a session
    over: asyncio.Event = field(default_factory=asyncio.Event)
    errors: Counter[str] = field(default_factory=Counter[str])
    ended: dict[str, int] = field(default_factory=dict[str, int])
    latencies_s: list[float] = field(default_factory=list[float])
    num_turns: int = 0
    num_ended: int = 0
    num_leased: int = 0

    @property
    def longest_session_s(self) -> float:
        return 1.5 * self.mean_turns * self.num_sessions / self.turns_per_s

    async def play(self) -> None:
        """Let all agents play. Once it is `over`, each ends its session."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http, asyncio.TaskGroup() as group:
            for number in range(self.num_sessions):
                name = list(PROTOCOLS)[number % len(PROTOCOLS)]
                world = (http, self.base_url, self.admin_key, self.text, number, PROTOCOLS[name], self.latencies_s)
                group.create_task(self._live(SoakAgent(*world, name=name)))

    async def _live(self, agent: SoakAgent) -> None:
        while not await self._is_over_soon():
            num_turns, last = 0, random.randint(self.mean_turns // 2, self.mean_turns * 3 // 2)
            try:
                await agent.start()
                while num_turns < last and not (num_turns and await self._is_over_soon()):
                    await agent.turn()
                    num_turns += 1
                    self.num_turns += 1
                self.ended[agent.session_id] = num_turns  # before its end, after which it may be leased at once
                await agent.end()
                self.num_ended += 1
            except (TurnFailed, aiohttp.ClientError, OSError, LookupError, ValueError) as error:
                self.errors[f"agent: {agent.name}, {error!r}"[:400]] += 1

    async def _is_over_soon(self) -> bool:
        """Think for a while, unless it is over meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0, 2 * self.num_sessions / self.turns_per_s)):
                await self.over.wait()
        return self.over.is_set()

    async def train(self, gateway: OnlineGateway, step: int) -> None:
        """Lease for a train step all that is finished, then say that it is trained and that its version serves."""
        num_finished = self.num_ended - self.num_leased
        batch, _ = await gateway.lease(step, num_trajectories=num_finished) if num_finished else (None, None)
        for one in (one for group in batch.groups for one in group.trajectories) if batch else ():
            if (num_turns := self.ended.pop(one.session_id, None)) is not None:  # else it is the fuzzer's
                self.num_leased += 1
                if len(one.turns) < num_turns:
                    self.errors[f"lost: {one.session_id} has {len(one.turns)} of {num_turns} answered turns"] += 1
        await gateway.publish(step, incarnation=1)
        await gateway.acknowledge(step, f"step-{step}")
