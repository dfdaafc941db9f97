"""A run on a Ray cluster of three nodes, which are processes of this machine; without Ray these tests are skipped.

- It goes on when the node of an engine and a worker dies: the engine serves elsewhere, and the ledger is proved.
- What finds no room is named.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.ray_hosts import Need, open_ray
from areal_agent.config import Config
from areal_agent.engine.fleet.fleet import MemberReport
from areal_agent.engine.fleet.member import MemberState
from areal_agent.errors import ConfigError
from areal_agent.ledger.verify import verify
from areal_agent.run.run import Run

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow  # a node takes seconds to start, a process more

HEAD = {"num_cpus": 2, "resources": {"head": 8}, "include_dashboard": False}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # a machine that tests in parallel is slow
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=HEAD)
    yield cluster
    cluster.shutdown()


async def test_a_run_survives_the_node_of_a_worker_and_an_engine(
    cluster: Any, tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [cluster.add_node(num_cpus=1, resources={"sandbox": 1}) for _ in range(2)]
    cluster.wait_for_nodes()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps({"id": str(n), "question": f"What is {n}?"}) for n in range(50)))
    config = Config.parse(
        {
            "model": str(small_model),
            "workflow": "agents:count_digits",
            "tasks": str(tasks),
            "run_dir": str(tmp_path / "run"),
            "steps": 4,
            "batch_size": 1,
            "group_size": 4,
            "trainer": {"threads": 2},  # only the head has room for it
            "rollout": {"workers": 2, "max_concurrent": 4, "max_tokens": 8, "timeout_s": 300},
            "engine": {"num_servers": 2, "max_context_tokens": 128, "startup_timeout_s": 300},
            "eval": {"num_tasks": 0},
            "cluster": {"kind": "ray", "address": cluster.address, "worker_resources": {"sandbox": 1}},
        }
    )
    async with asyncio.timeout(900), Run(config) as run:
        engines = run.source.serving.engine.client
        await train(run, 2)
        before = set(run.source.serving.engine.urls)
        cluster.add_node(num_cpus=1, resources={"sandbox": 1})
        cluster.remove_node(nodes[0], allow_graceful=False)
        await train(run, 4)
        while not is_replaced(engines.report(), before):
            await engines.roster.changed()
        await run.save()
        await run.stop_producing()
        await run.settle(is_completed=True)
    report = verify(run.folder.ledger)
    assert report.is_ok, report


def is_replaced(engines: Sequence[MemberReport], before: set[str]) -> bool:
    """Whether two engines serve, one of them under another URL."""
    serving = {one.url for one in engines if one.state is MemberState.SERVING}
    return len(engines) == len(serving) == 2 and len(serving - before) == 1


async def train(run: Run, until_step: int) -> None:
    while run.step < until_step:
        await run.train_step(await run.prepare_batch())
        await run.push()


async def test_what_finds_no_room_is_named(cluster: Any) -> None:
    config = ClusterConfig(kind="ray", address=cluster.address, placement_timeout_s=1.0)
    needs = [Need(names=("engine",), resources={"CPU": 1}), Need(names=("worker 0",), resources={"sandbox": 1})]
    with pytest.raises(ConfigError, match=r"found no room for worker 0 with \{'sandbox': 1\}.*add nodes"):
        async with open_ray(config, needs):
            pass
