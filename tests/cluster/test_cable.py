"""A pulled cable, between machines in network namespaces (root alone).

- A worker that is cut off in the middle of a rollout: the run begins its rollout again elsewhere. When the cable is
  back, nothing of what it writes counts, and it ends.
- A run on a Ray cluster whose node with an engine and a worker is cut off goes on, and gets both back elsewhere. What
  was cut off ends by itself while it still is. The ledger is proved (full).
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from areal_agent import Status
from areal_agent.cluster.config import ClusterConfig
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


PORT = 6399
QUICK_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@contextmanager
def ray_on(cables: Cables) -> Generator[str]:
    """A Ray cluster of the machines; yield its address."""
    address = f"{address_of(HEAD)}:{PORT}"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True))
        first = ["--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false", "--num-cpus=3"]
        others = [f"--address={address}", "--num-cpus=2", '--resources={"sandbox": 2}']
        for name, words in ((HEAD, first), ("n1", others), ("n2", others)):
            command = [*cables.on(name), sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words]
            node = subprocess.Popen(
                [*command, "--disable-usage-stats", f"--node-ip-address={address_of(name)}"],
                env={**os.environ, **QUICK_CHECKS, "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "300"},
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(node.wait)
            stack.callback(_end_all_on, cables, name)
            if name == HEAD:
                _until_it_listens()
        yield address


def _until_it_listens() -> None:
    while subprocess.run(["ss", "-Hltn", f"sport = {PORT}"], capture_output=True, check=True).stdout == b"":
        time.sleep(0.1)


def _end_all_on(cables: Cables, name: str) -> None:
    for process_id in cables.process_ids(name) - {os.getpid()}:
        if psutil.pid_exists(process_id):
            psutil.Process(process_id).kill()


@pytest.mark.full
async def test_a_run_survives_a_pulled_cable(
    cables: Cables, tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with ray_on(cables) as address:
        cluster = ClusterConfig(kind="ray", address=address, worker_resources={"sandbox": 1})
        config = Config.parse(run_values(tmp_path, small_model, cluster, trainer={"threads": 3}))
        async with asyncio.timeout(900), Run(config) as run:
            engines, workers = run.source.serving.engine.client, run.source.serving.rollouts
            await train(run, 2)
            cut = {address_of(name): name for name in ("n1", "n2")}[engines.report()[0].url.split(":")[1].strip("/")]
            cut_off = of_runs(cables.process_ids(cut))
            begin_s = time.monotonic()

            def tell(what: str) -> None:
                print(f"{what}: {time.monotonic() - begin_s:.1f} s after the cable was pulled")

            cables.pull(cut)
            num_steps = run.step
            await until_serving(engines, len({"n1", "n2"}) - 1)
            tell("its engine is given up")
            await train(run, num_steps + 2)
            tell("two more steps")
            await until_serving(engines, 2)
            tell("another engine serves")
            while not all(seat.has_room for seat in workers.seats):
                await train(run, run.step + 1)
            tell("another worker rolls out")
            await asyncio.to_thread(until_ended, cut_off)
            tell("what was cut off has ended")
            cables.plug(cut)
            await train(run, run.step + 4)
            assert not of_runs(cables.process_ids(cut))
            assert {one.version for one in await engines.survey()} == {run.version}
            await run.save()
            await run.stop_producing()
            await run.settle(is_completed=True)
        report = verify(run.folder.ledger)
        assert report.is_ok, report
