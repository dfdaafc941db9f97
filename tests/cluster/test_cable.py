"""A pulled cable, between machines in network namespaces (root alone).

- A worker that is cut off in the middle of a rollout: the run begins its rollout again elsewhere. When the cable is
  back, nothing of what it writes counts, and it ends.
- A run on a Ray cluster whose node with an engine and a worker is cut off goes on, and gets both back elsewhere. What
  was cut off ends by itself while it still is. The ledger is proved (full).
"""

import asyncio
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from areal_agent import Status
from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.ray_hosts import NICENESS
from areal_agent.config import Config
from areal_agent.ledger.verify import verify
from areal_agent.run.run import Run
from areal_agent.types import Drop, Fate, PauseMode
from tests.cluster.cables import HEAD, Cables, address_of, laid_cables
from tests.cluster.conftest import of_runs, until_ended
from tests.cluster.fake_ray import FakeRay, Node, on_a_cluster
from tests.cluster.test_ray import run_values, train, until_serving
from tests.cluster.test_workers import roll_out, until_sampling

pytestmark = pytest.mark.slow


@pytest.fixture
def cables() -> Generator[Cables]:
    with laid_cables() as cables:
        yield cables


async def test_a_worker_that_is_cut_off_writes_nothing(cables: Cables, make_crew) -> None:
    one, two = (Node(prefix=cables.on(name)) for name in ("n1", "n2"))
    ray = FakeRay(one, two)
    home = address_of(HEAD)
    async with on_a_cluster(ray, "worker 0", home=home, lost_after_s=5.0) as hosts, asyncio.timeout(300.0):
        crew = await make_crew("solve", is_elsewhere=True, hosts=hosts, home=home, workers=1, timeout_s=5.0)
        (seat,) = crew.pool.seats
        await crew.engine.pause(PauseMode.IN_PLACE)
        (running,) = await roll_out(crew, 0)
        await until_sampling(crew, 1)
        cut_off = one.process_ids
        ray.cut(one)
        cables.pull("n1")
        while seat.has_room:  # until it is buried
            await crew.pool.stats()
        ray.declare_dead(one)
        await crew.engine.resume()
        ended = await running
        assert (ended.session_id, ended.status, ended.lost) == ("s-0.2", Status.COMPLETED, ("s-0",))
        assert len(two.process_ids) == 1
        cables.plug("n1")
        await asyncio.to_thread(until_ended, cut_off)
        orphan = await crew.ledger.trajectory("s-0")
        assert (orphan.status, orphan.fate) == (Status.ORPHAN, Fate(dropped=Drop.ORPHAN))


OF_RAY = {
    "RAY_AUTH_MODE": "disabled",  # otherwise it depends on whether this machine has a token
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "300",
    NICENESS: "0",
}


@pytest.fixture
def cluster(cables: Cables, monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """A Ray cluster with a node on each machine."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra ray is not installed")
    for variable, value in OF_RAY.items():
        monkeypatch.setenv(variable, value)
    cluster = cluster_utils.Cluster()
    try:
        cluster.add_node(node_ip_address=address_of(HEAD), num_cpus=3, include_dashboard=False)
        for name in ("n1", "n2"):
            with cables.entered(name):
                cluster.add_node(node_ip_address=address_of(name), num_cpus=2, resources={"sandbox": 2}, wait=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.full
async def test_a_run_survives_a_pulled_cable(
    cables: Cables, cluster: Any, tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    on_nodes = ClusterConfig(kind="ray", address=cluster.address, worker_resources={"sandbox": 1})
    config = Config.parse(run_values(tmp_path, small_model, on_nodes, trainer={"threads": 3}))
    async with asyncio.timeout(900), Run(config) as run:
        engines, workers = run.source.serving.engine.client, run.source.serving.rollouts
        await train(run, 2)
        cut = next(name for name in ("n1", "n2") if address_of(name) in engines.report()[0].url)
        cut_off = of_runs(cables.process_ids(cut))
        begin_s = time.monotonic()

        def tell(what: str) -> None:
            print(f"{what}: {time.monotonic() - begin_s:.1f} s after the cable was pulled")

        cables.pull(cut)
        ending = asyncio.create_task(asyncio.to_thread(until_ended, cut_off))
        ending.add_done_callback(lambda _: tell("what was cut off has ended"))
        await train(run, run.step + 2)
        tell("two more steps")
        await until_serving(engines, 2)
        tell("two engines serve")
        while not all(seat.has_room for seat in workers.seats):
            await train(run, run.step + 1)
        tell("two workers roll out")
        await ending
        cables.plug(cut)
        await train(run, run.step + 4)
        assert not of_runs(cables.process_ids(cut))
        assert {one.version for one in await engines.survey()} == {run.version}
        await run.save()
        await run.stop_producing()
        await run.settle(is_completed=True)
    report = verify(run.folder.ledger)
    assert report.is_ok, report
