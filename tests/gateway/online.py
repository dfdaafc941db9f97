"""Helpers: a stand-alone gateway with its real ledger, and a trainer's calls to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.gateway.online.consumer import Consumer
from areal_agent.gateway.online.groups import Bound
from areal_agent.gateway.online.wire import LeaseReply, decode_lease
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import Fate

from .conftest import Agent, OpenWorld, World

GROUP_WAIT_S = 60.0


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(kw_only=True)
class Online:
    """One life of a gateway: its world, its ledger, and what a trainer says to it."""

    world: World
    ledger: Ledger
    clock: Clock
    path: Path
    open_world: OpenWorld

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return await self.world.call(f"/rl/{path}", body)

    async def done(self, path: str, **body: Any) -> Any:
        status, answer = await self.post(path, **body)
        assert status == 200, answer
        return answer

    async def lease(self, step: int, **body: Any) -> LeaseReply:
        return decode_lease(await self.done("lease", step=step, **({"num_groups": 1} | body)))

    async def play(self, group_id: str, size: int = 1, *, reward: float | None = 1.0, **end: Any) -> list[Agent]:
        """Whole rollouts of one turn: a group."""
        agents = [await self.world.start(group_id=group_id, group_size=size) for _ in range(size)]
        for agent in agents:
            await agent.post_chat()
            if reward is not None:
                await agent.reward(reward=reward)
            await agent.end(**end)
        return agents

    async def restart(self) -> None:
        """Go on with the next process on the same ledger; this one's is gone."""
        await self.ledger.aclose()
        later = await open_online(self.open_world, self.path, clock=self.clock)
        self.world, self.ledger = later.world, later.ledger


async def open_online(
    open_world: OpenWorld, path: Path, *, bound: Bound | None = None, clock: Clock | None = None, script: Any = None
) -> Online:
    clock = clock or Clock()
    ledger = await Ledger.open(path, create=True)
    await ledger.begin_incarnation(None)
    consumer = await Consumer.open(ledger, bound=bound, group_wait_s=GROUP_WAIT_S, clock=clock)

    def hello(request: Any) -> list[int]:
        return world.ids("hello world<|im_end|>")

    world = await open_world(script=script or hello, journal=consumer, archive=ledger, consumer=consumer)
    return Online(world=world, ledger=ledger, clock=clock, path=path, open_world=open_world)


def ids_of(reply: LeaseReply) -> list[list[str]]:
    return [[one.session_id for one in group.trajectories] for group in reply.groups]


def ids(agents: list[Agent]) -> list[str]:
    return sorted(agent.id for agent in agents)


async def fate(online: Online, agent: Agent) -> Fate | None:
    return (await online.ledger.trajectory(agent.id)).fate
