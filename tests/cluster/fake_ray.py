"""What `ray_hosts` uses of Ray, in this process: nodes that can die, be cut off or be full, in time that a test passes.

Starters and their processes are real. A node that is cut off works on, and nothing reaches it or comes from it; as in
Ray, its bundles move only when it is declared dead.
"""

import asyncio
import functools
import math
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.hosts import LOOPBACK
from areal_agent.cluster.ray_hosts import Need, RayHosts, Starter

PACE_S = 0.25
"""Less than what counts as a sleep of this process (`awake_timeout`)."""


class PassingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is ahead of the real one by the time that a test has let pass."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def in_passing_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in a `PassingLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **values: Any) -> None:
        with asyncio.Runner(loop_factory=PassingLoop) as runner:
            runner.run(test(*args, **values))

    return run


async def pass_time(duration_s: float) -> None:
    """Let time pass: what is due meanwhile happens in its order."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PassingLoop)
    for _ in range(math.ceil(duration_s / PACE_S)):
        loop.ahead_s += PACE_S
        for _ in range(20):  # a call passes through a few tasks
            await asyncio.sleep(0)


class RayError(Exception):
    """The base of Ray's errors."""


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """A machine with room for so many bundles. `prefix` begins the command lines of its processes."""

    room: int = 1
    prefix: Sequence[str] = ()
    is_cut: bool = False
    is_dead: bool = False  # Ray has said so
    actors: list["Actor"] = field(default_factory=list["Actor"])

    @property
    def process_ids(self) -> set[int]:
        processes = [actor.starter._process for actor in self.actors]
        return {process.pid for process in processes if process is not None and process.is_running}

    def end(self) -> None:
        """End all that runs here."""
        for actor in self.actors:
            if (process := actor.starter._process) is not None:
                process.kill()
        self.actors.clear()


class Group(list[Node | None]):
    """A placement group: the node of each bundle."""

    def wait(self, _: float) -> bool:
        """Return whether all bundles have a node. A test lets no time pass here."""
        return None not in self


class Actor:
    """A starter on the node of a bundle, once that has one. Its methods are called as with Ray."""

    def __init__(self, ray: "FakeRay", group: Group, index: int) -> None:
        self.starter = Starter()
        self._ray = ray
        self._group = group
        self._index = index
        self._node: Node | None = None

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(self._call(method, arguments)))

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        node = await self._created()
        await self._pass_cable(node)
        if method == "start":
            name, argv, *others = arguments
            arguments = (name, [*node.prefix, *argv], *others)
        answer = await asyncio.shield(asyncio.ensure_future(getattr(self.starter, method)(*arguments)))
        await self._pass_cable(node)
        return answer

    async def _created(self) -> Node:
        while self._node is None:
            self._ray.require_head()
            node = self._group[self._index]
            if node is None or node.is_cut:
                await self._ray.changed()
            else:
                self._node = node
                node.actors.append(self)
        return self._node

    async def _pass_cable(self, node: Node) -> None:
        while node.is_cut and not node.is_dead:
            await self._ray.changed()
        self._ray.require_head()
        if self not in node.actors or node.is_dead:
            raise RayError("The actor died because its node has died.")


class FakeRay:
    """The module `ray`, connected to a cluster of these nodes."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {}))

    def __init__(self, *nodes: Node) -> None:
        self.util = SimpleNamespace(
            placement_group=self._place,
            remove_placement_group=lambda _: None,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *where: where),
        )
        self.actors: list[Actor] = []
        self._nodes = list(nodes)
        self._groups: list[Group] = []
        self._has_head = True
        self._has_changed = asyncio.Event()

    def remote(self, _: type[Starter]) -> Any:
        def options(*, scheduling_strategy: tuple[Group, int], **_: Any) -> Any:
            return SimpleNamespace(remote=lambda: self._actor(*scheduling_strategy))

        return SimpleNamespace(options=options)

    def _actor(self, group: Group, index: int) -> Actor:
        self.actors.append(Actor(self, group, index))
        return self.actors[-1]

    def kill(self, _: Actor) -> None:
        """Do nothing: whoever kills a starter has ended its process, or cannot reach it."""

    def available_resources(self) -> Mapping[str, float]:
        return {"CPU": sum(map(self._room_of, self._nodes))}

    # -------------------------------------------------------------------------------------------------- what happens

    def kill_node(self, node: Node) -> None:
        node.end()
        self.declare_dead(node)

    def cut(self, node: Node) -> None:
        node.is_cut = True

    def declare_dead(self, node: Node) -> None:
        """Ray's health check gives a node up: its bundles move."""
        node.is_dead = True
        for group in self._groups:
            group[:] = [None if where is node else where for where in group]
        self._change()

    def mend(self, node: Node) -> None:
        """The cable is back. A node that was declared dead learns it then, and ends."""
        node.is_cut = False
        if node.is_dead:
            node.end()
        self._change()

    def add(self, node: Node) -> None:
        self._nodes.append(node)
        self._change()

    def lose_head(self) -> None:
        self._has_head = False
        self._change()

    def require_head(self) -> None:
        if not self._has_head:
            raise RayError("The head node is gone.")

    async def changed(self) -> None:
        await self._has_changed.wait()

    def _change(self) -> None:
        """Find nodes for the bundles without one, and wake who waits."""
        for group in self._groups:
            for index in [index for index, where in enumerate(group) if where is None]:
                free = [node for node in self._nodes if not node.is_dead and self._room_of(node)]
                group[index] = max(free, key=self._room_of, default=None)
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def _room_of(self, node: Node) -> int:
        return node.room - sum(group.count(node) for group in self._groups)

    def _place(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> Group:
        self._groups.append(Group([None] * len(bundles)))
        self._change()
        return self._groups[-1]


@asynccontextmanager
async def on_a_cluster(ray: FakeRay, *names: str, home: str = LOOPBACK, **config: Any) -> AsyncGenerator[RayHosts]:
    """Reserve a bundle for each name."""
    hosts = RayHosts(ray, ClusterConfig(kind="ray", **config), home, [os.getcwd()])
    await hosts.reserve([Need(names=(name,), resources={"CPU": 1}) for name in names])
    try:
        yield hosts
    finally:
        for actor in ray.actors:
            await actor.starter.end(0.0, with_session=True)
