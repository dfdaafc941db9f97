"""The faults of a cluster, on a fake Ray with real starters and keepers; test_cable.py and test_ray.py have real ones.

- A node dies: its server is started again on any node with room, under its new URL.
- A node is cut off: its process counts as dead after `cluster.lost_after_s`, not before, and is started elsewhere; what
  was cut off ends by itself, and is not used when the cable is back.
- A cable that is back before that costs nothing.
- No node has room: it waits, takes one that joins, or is given up, and what is missing is named.
- Ray itself is gone: every server is given up, with an error that says so.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from areal_agent.cluster.hosts import Hosts, Process
from areal_agent.cluster.ray_hosts import LIMITS_A_LEASE
from areal_agent.cluster.servers import KeptServer, KeptServers, keep_servers
from areal_agent.errors import ProcessDied
from tests.cluster.conftest import until_ended
from tests.cluster.fake_ray import FakeRay, Node, in_passing_time, on_a_cluster, pass_time

LOST_AFTER_S = 10.0


@asynccontextmanager
async def serving_on(hosts: Hosts, logs: Path) -> AsyncGenerator[KeptServers]:
    """Keep one server, whose URL counts its processes."""
    num_started = 0

    async def start() -> Process:
        nonlocal num_started
        host = await hosts.host_for("engine")
        num_started += 1
        return await host.start("engine", ["sleep", "100000"], log_path=logs / "engine.log")

    async def serves(_: Process) -> str:
        return f"http://engine:{num_started}"

    async def end(process: Process) -> None:
        await process.aclose(with_session=True)

    async with asyncio.timeout(3600.0), keep_servers([KeptServer(start, serves, end)]) as servers:  # of passing time
        yield servers


FIRST, SECOND = "http://engine:1", "http://engine:2"


@in_passing_time
async def test_a_server_whose_node_dies_is_started_elsewhere(tmp_path: Path) -> None:
    one, two = Node(room=2), Node()
    ray = FakeRay(one, two)
    async with on_a_cluster(ray, "engine") as hosts, serving_on(hosts, tmp_path) as servers:
        ray.kill_node(one)
        assert await servers.news.get() == (FIRST, None)
        assert await servers.news.get() == (FIRST, SECOND)
        assert len(two.process_ids) == 1


@in_passing_time
async def test_a_node_that_is_cut_off(tmp_path: Path) -> None:
    one, two = Node(room=2), Node()
    ray = FakeRay(one, two)
    async with on_a_cluster(ray, "engine", lost_after_s=LOST_AFTER_S) as hosts, serving_on(hosts, tmp_path) as servers:
        cut_off = one.process_ids
        ray.cut(one)
        await pass_time(LOST_AFTER_S - 1.0)
        assert servers.news.empty()
        await pass_time(1.0 + LOST_AFTER_S / 4)  # the last answer may have come a little after the cut
        assert await servers.news.get() == (FIRST, None)
        ray.declare_dead(one)
        assert await servers.news.get() == (FIRST, SECOND)
        assert one.process_ids == cut_off  # it does not know yet
        await pass_time(LIMITS_A_LEASE * LOST_AFTER_S)
        await asyncio.to_thread(until_ended, cut_off)
        ray.mend(one)
        await pass_time(LIMITS_A_LEASE * LOST_AFTER_S)
        assert (servers.urls, len(two.process_ids)) == ((SECOND,), 1)


@in_passing_time
async def test_a_cable_that_is_back_in_time_costs_nothing(tmp_path: Path) -> None:
    node = Node()
    ray = FakeRay(node)
    async with on_a_cluster(ray, "engine", lost_after_s=LOST_AFTER_S) as hosts, serving_on(hosts, tmp_path) as servers:
        before = node.process_ids
        ray.cut(node)
        await pass_time(LOST_AFTER_S - 1.0)
        ray.mend(node)
        await pass_time(LIMITS_A_LEASE * LOST_AFTER_S)
        assert (servers.urls, node.process_ids) == ((FIRST,), before)


@in_passing_time
async def test_a_server_without_room_elsewhere_waits_for_a_node(tmp_path: Path) -> None:
    one, two = Node(), Node()
    ray = FakeRay(one)
    async with on_a_cluster(ray, "engine") as hosts, serving_on(hosts, tmp_path) as servers:
        ray.kill_node(one)
        await pass_time(200.0)
        assert await servers.news.get() == (FIRST, None)
        ray.add(two)
        assert await servers.news.get() == (FIRST, SECOND)
        assert len(two.process_ids) == 1


@in_passing_time
async def test_a_server_that_finds_no_room_is_given_up_and_named(tmp_path: Path) -> None:
    node = Node()
    ray = FakeRay(node)
    async with on_a_cluster(ray, "engine", placement_timeout_s=30.0) as hosts, serving_on(hosts, tmp_path) as servers:
        ray.kill_node(node)
        failure = asyncio.create_task(servers.failure())
        await pass_time(30.0)
        assert not failure.done()
        await pass_time(60.0)  # two tries
        assert "there is no node for the engine with {'CPU': 1}: none had room within" in str(await failure)


@in_passing_time
async def test_without_ray_every_server_is_given_up(tmp_path: Path) -> None:
    node = Node()
    ray = FakeRay(node)
    async with on_a_cluster(ray, "engine") as hosts, serving_on(hosts, tmp_path) as servers:
        ray.lose_head()
        failure = await servers.failure()
        assert isinstance(failure, ProcessDied)
        assert "3 deaths within 60 s of service; the last: there is no node for the engine" in str(failure)
