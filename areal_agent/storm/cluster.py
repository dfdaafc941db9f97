"""A Ray that is not there: as much of it as `cluster/ray_hosts.py` asks for, on nodes that can be lost and cut off.

a bundle   is on one node, and on another one once Ray takes that for lost
an actor   is a program there, which starts others that end with it
a node     is lost: all its programs end, and it is back, empty, later
           is cut off: its programs go on, and nothing gets to it or from it
           stands still: nor do its programs go on
Ray        says `NOTICED_S` later that the actors there are gone, and ends those that are back alive
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from areal_agent.callback import LOOPBACK
from areal_agent.storm.machine import PROGRAM, Node, Program
from areal_agent.storm.truth import Truth

NOTICED_S = 30.0
"""The time in which Ray sees that a node is gone."""
LATENCY_S = 0.001
LAST_S = 1.0
"""The time for which the actors that are taken for lost go on once their node is back."""


class RayError(Exception):
    """An actor is gone."""


class RayTaskError(RayError):
    """A method of an actor raised an error. Here the error itself is raised."""


@dataclass(kw_only=True, eq=False)
class Group:
    """A placement group: the node of each bundle."""

    nodes: list[Node]

    def wait(self, limit_s: float) -> bool:
        return True  # one node is always there, and has room for all


@dataclass(frozen=True, slots=True)
class Bundle:
    """The place of an actor."""

    group: Group
    index: int


class Actor:
    """An object on a node."""

    def __init__(self, bundle: Bundle, node: Node, make: Callable[[], object]) -> None:
        self.bundle = bundle
        self.node = node
        self.program = Program("actor", node)
        self.gone = asyncio.get_running_loop().create_future()  # done once Ray says so
        self._context = contextvars.Context()
        self._context.run(PROGRAM.set, self.program)
        self._made = self._context.run(make)

    async def answer(self, method: str, arguments: Sequence[object]) -> Any:
        """Call a method there. Raises RayError once Ray says that the actor is gone."""
        working = asyncio.create_task(self._work(method, arguments))
        working.add_done_callback(_look_at)
        await asyncio.wait({working, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RayError("the actor is gone")
        return working.result()

    async def _work(self, method: str, arguments: Sequence[object]) -> Any:
        await reached(self.node)
        work = getattr(self._made, method)(*arguments)
        answer = await asyncio.get_running_loop().create_task(work, context=self._context.copy())
        await reached(self.node)
        return answer

    def lose(self) -> None:
        """Have Ray say that it is gone."""
        if not self.gone.done():
            self.gone.set_result(None)

    async def end(self) -> None:
        """End it, once it can be reached."""
        await reached(self.node)
        self.program.kill()
        self.lose()


class Handle:
    """An actor as its callers see it: `handle.method.remote(...)`."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: object) -> "asyncio.Task[Any]":
            call = asyncio.create_task(self.actor.answer(method, arguments))
            call.add_done_callback(_look_at)
            return call

        return SimpleNamespace(remote=remote)


def _look_at(call: asyncio.Task[Any]) -> None:
    """Mark its error as seen: nobody may wait for it any more."""
    if not call.cancelled():
        call.exception()


async def reached(node: Node) -> None:
    """Wait until a message gets to a node, or from it."""
    await asyncio.sleep(LATENCY_S)
    while node.is_silent():  # noqa: ASYNC110 (a network tells nobody)
        await asyncio.sleep(0.5)


def _beside(work: Coroutine[Any, Any, None]) -> None:
    """Do what goes on whichever programs die."""
    asyncio.get_running_loop().create_task(work, context=contextvars.Context())


class Cluster:
    """The nodes, and their Ray."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._nodes = [Node(f"node {number}") for number in (1, 2, 3)]
        self._taken_for_lost: set[Node] = set()
        self._actors: list[Actor] = []

    def module(self) -> ModuleType:
        """Return what `import ray` gives."""
        ray: Any = ModuleType("ray")
        ray.__spec__ = ModuleSpec("ray", None)
        ray.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        ray.util = SimpleNamespace(
            placement_group=self._place,
            remove_placement_group=self._remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=Bundle),
            get_node_ip_address=lambda: LOOPBACK,
        )
        ray.cluster_resources = ray.available_resources = dict
        ray.remote = self._remote
        ray.kill = self._kill
        return ray

    def _place(self, bundles: Sequence[object], strategy: str) -> Group:
        return Group(nodes=[self._node() for _ in bundles])

    def _node(self) -> Node:
        return random.choice([node for node in self._nodes if node not in self._taken_for_lost])

    def _remove(self, group: Group) -> None:
        self._end([one for one in self._actors if one.bundle.group is group])

    def _remote(self, make: Callable[[], object]) -> Any:
        def options(*, scheduling_strategy: Bundle, **_: object) -> Any:
            return SimpleNamespace(remote=partial(self._start, scheduling_strategy, make))

        return SimpleNamespace(options=options)

    def _start(self, bundle: Bundle, make: Callable[[], object]) -> Handle:
        nodes = bundle.group.nodes
        if any(one.bundle == bundle and not one.gone.done() for one in self._actors):
            self._truth.faults.append("a process is started before the room of the one before it was given back")
        if nodes[bundle.index] in self._taken_for_lost:
            nodes[bundle.index] = self._node()
        self._actors.append(Actor(bundle, nodes[bundle.index], make))
        return Handle(self._actors[-1])

    def _kill(self, handle: Handle) -> None:
        self._end([handle.actor])

    def _end(self, actors: Sequence[Actor]) -> None:
        self._actors = [one for one in self._actors if one not in actors]
        for actor in actors:
            _beside(actor.end())

    def end_job(self) -> None:
        """End all actors: the process that started them is gone."""
        self._end(self._actors)

    # ----------------------------------------------------------------------------------------------- faults

    def may_fail(self, node: Node) -> bool:
        """Return whether another node is there."""
        return any(not one.is_silent() for one in self._nodes if one is not node)

    def cut_off(self, node: Node, for_s: float) -> None:
        node.silence(for_s)
        _beside(self._notice(node, for_s))

    def stand_still(self, node: Node, for_s: float) -> None:
        for program in node.programs:
            program.stop()
            asyncio.get_running_loop().call_later(for_s, program.go_on)
        self.cut_off(node, for_s)

    def lose(self, node: Node, for_s: float) -> None:
        for program in node.programs:
            program.kill()
        self.cut_off(node, for_s)

    async def _notice(self, node: Node, for_s: float) -> None:
        await asyncio.sleep(min(for_s, NOTICED_S))
        gone = [one for one in self._actors if one.node is node and (one.program.is_dead or node.is_silent())]
        for actor in gone:
            actor.lose()
        while node.is_silent():
            self._taken_for_lost.add(node)
            await asyncio.sleep(1.0)
        self._taken_for_lost.discard(node)
        await asyncio.sleep(LAST_S)
        self._end(gone)
