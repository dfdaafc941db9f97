"""Runs on a Ray cluster whose nodes are processes of this machine.

- What finds no room is named, and so is what a machine lacks.
- A run goes on when the node of an engine and a worker dies: both are started on another node, the engine with the
  newest weights, which the trainer sends it, and the ledger is proved. Its engines refuse who has no key.
- The size of a trainer that fits is found. When the node of a rank dies, the run goes on with that size by itself,
  nothing is trained twice, and the ledger is proved.
- A main process that is killed leaves no process on any node, and a resume goes on.
- The quickstart learns on three nodes by their address alone (full). run/test_survival.py has a Ray of a run's own.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.ray_hosts import NICENESS, open_hosts, ranks_that_fit
from areal_agent.config import Config
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberState
from areal_agent.errors import ConfigError, EngineRejected
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import living_rows, read_metrics, step_rows
from areal_agent.rollout.config import RolloutConfig
from areal_agent.run.run import Run
from areal_agent.trainer.config import TrainerConfig
from areal_agent.types import DistributedWeights
from tests.cluster.conftest import of_runs, until_ended
from tests.commands import run as run_command
from tests.commands import started
from tests.resume.test_saving import read_until
from tests.run.test_run import config

pytestmark = pytest.mark.slow  # a node takes seconds to start, a process more

HEAD = {"num_cpus": 2, "resources": {"head": 8}, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "300")  # a machine that tests in parallel is slow
        patch.setenv(NICENESS, "0")
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=HEAD)
        yield cluster
        cluster.shutdown()


def config_of(cluster: Any, **values: Any) -> ClusterConfig:
    return ClusterConfig(kind="ray", address=cluster.address, lost_after_s=20.0, **values)


async def test_what_finds_no_room_is_named(cluster: Any) -> None:
    config = config_of(cluster, placement_timeout_s=5.0, worker_resources={"moon": 1})
    with pytest.raises(ConfigError, match=r"found no room for worker 0 with \{'moon': 1\.0\}.*add nodes"):
        async with open_hosts(config, EngineConfig(), RolloutConfig(workers=1)):
            pass


async def test_what_a_machine_lacks_is_named(cluster: Any, tmp_path: Path) -> None:
    shared = [tmp_path, tmp_path / "model"]
    async with open_hosts(config_of(cluster), EngineConfig(), RolloutConfig(), shared=shared) as hosts:
        with pytest.raises(ConfigError, match=r"has put the engine, is not like this one: it has no \S+/model; every"):
            await hosts.host_for("engine")


@pytest.mark.parametrize(("trainer", "size"), [({"num_ranks": 4}, 1), ({"num_ranks": 4, "context_parallel": 2}, 2)])
async def test_the_size_that_fits(cluster: Any, trainer: dict[str, int], size: int) -> None:
    """Beside the engine the head has room for one rank. Where that is no size, a start has to wait for the smallest."""
    found = await ranks_that_fit(config_of(cluster), EngineConfig(), RolloutConfig(), TrainerConfig(**trainer))
    assert found == size


async def test_a_run_survives_the_node_of_a_worker_and_an_engine(
    cluster: Any, tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [cluster.add_node(num_cpus=1, resources={"sandbox": 1}) for _ in range(2)]
    cluster.wait_for_nodes()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    on_nodes = config_of(cluster, worker_resources={"sandbox": 1})
    trainer = {"threads": 2, "transfer": "distributed"}  # only the head has room for it
    config = Config.parse(run_values(tmp_path, small_model, on_nodes, trainer=trainer))
    async with asyncio.timeout(900), Run(config) as run:
        engines = run.source.serving.engine.client
        await train(run, 2)
        stranger = HttpEngine(run.source.serving.engine.urls[0])
        with pytest.raises(EngineRejected, match="AREAL_AGENT_ENGINE_KEY"):
            await stranger.info()
        await stranger.aclose()
        cluster.add_node(num_cpus=1, resources={"sandbox": 1})
        cluster.remove_node(nodes[0], allow_graceful=False)
        await until_serving(engines, 1)
        await train(run, 4)
        while [one.state for one in engines.report()] != [MemberState.SERVING] * 2:  # the one that died is out
            await engines.roster.changed()
        due = engines.pushes.due
        assert due is not None and isinstance(due.source, DistributedWeights)
        assert "127.0.0.1" not in {part.host for part in due.source.parts}  # an address for other machines
        workers = run.source.serving.rollouts
        while not all(seat.has_room for seat in workers.seats):
            await train(run, run.step + 1)
        assert {one.version for one in await engines.survey()} == {run.version}
        await run.save()
        await run.stop_producing()
        await run.settle(is_completed=True)
    report = verify(run.folder.ledger)
    assert report.is_ok, report


def run_values(tmp_path: Path, model: Path, cluster: ClusterConfig, **values: object) -> dict[str, Any]:
    """Return the config of a run with two engines and two workers, for which there is room on all nodes together."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps({"id": str(n), "question": f"What is {n}?"}) for n in range(50)))
    return {
        "model": str(model),
        "workflow": "agents:count_digits",
        "tasks": str(tasks),
        "run_dir": str(tmp_path / "run"),
        "steps": 100,
        "batch_size": 1,
        "group_size": 4,
        "rollout": {"workers": 2, "max_concurrent": 4, "max_tokens": 8, "timeout_s": 300},
        "engine": {"num_servers": 2, "max_context_tokens": 128, "startup_timeout_s": 300},
        "eval": {"num_tasks": 0},
        "cluster": cluster.model_dump(mode="json"),
        **values,
    }


async def until_serving(engines: Fleet, number: int) -> None:
    while sum(one.state is MemberState.SERVING for one in engines.report()) != number:
        await engines.roster.changed()


async def train(run: Run, until_step: int) -> None:
    while run.step < until_step:
        await run.train_step(await run.prepare_batch())
        await run.push()


def test_a_run_goes_on_by_itself_when_the_node_of_a_rank_dies(cluster: Any, tmp_path: Path, small_model: Path) -> None:
    nodes = [cluster.add_node(num_cpus=3) for _ in range(2)]  # the head has room for no rank
    cluster.wait_for_nodes()
    settings = config(
        tmp_path,
        small_model,
        steps=1000,
        workflow="tests.run.test_run:solve",
        trainer={"num_ranks": 2, "threads": 3, "checkpoint_every": 2, "startup_timeout_s": 600.0},
        cluster=config_of(cluster, restarts=1).model_dump(),
    )
    file = tmp_path / "config.yaml"
    file.write_text(settings.to_yaml())
    with started("areal_agent.train", "--config", str(file), "observe.progress=plain") as process:
        read_until(process, "3/1000")
        cluster.remove_node(next(node for node in nodes if has_rank(node, 1)), allow_graceful=False)
        *_, told = read_until(process, "going on after step ")
        assert "with 1 of 2 ranks; cluster.restarts left: 0" in told
        done = int(told.split("after step ")[1].split()[0])
        read_until(process, f"{done + 2}/1000")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    report = verify(tmp_path / "run" / "ledger.sqlite")
    assert report.is_ok, report
    rows = step_rows(living_rows(read_metrics(tmp_path / "run" / "metrics.jsonl")))
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["incarnation"] for row in rows} == {0, 1}


def has_rank(node: Any, number: int) -> bool:
    """Return whether that rank of a trainer runs on the node."""
    raylet = node.all_processes["raylet"][0].process.pid
    children = psutil.Process(raylet).children(recursive=True)
    return any({"areal_agent.trainer", f"--rank={number}"} <= set(child.cmdline()) for child in children)


def test_a_killed_driver_leaves_nothing_and_is_resumed(
    cluster: Any, tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add_node(num_cpus=1, resources={"sandbox": 1})
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    values = run_values(tmp_path, small_model, config_of(cluster, worker_resources={"sandbox": 1}))
    values |= {"steps": 4, "trainer": {"checkpoint_every": 1}, "engine": {"max_context_tokens": 128}}
    values["rollout"] |= {"workers": 1}
    config, folder = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(json.dumps(values))
    with started("areal_agent.train", "--config", str(config)) as driver:
        while not list((folder / "checkpoints").glob("step_*")):
            assert driver.poll() is None, driver.stdout and driver.stdout.read()
            time.sleep(0.1)
        raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
        everywhere = [child.pid for raylet in raylets for child in psutil.Process(raylet).children(recursive=True)]
        children = of_runs(everywhere)
        assert len(children) == len({"trainer", "engine", "worker 0"})
        driver.kill()
        killed_s = time.monotonic()
        until_ended(children)
        print(f"its children ended {time.monotonic() - killed_s:.1f} s after it was killed")
    done = run_command("areal_agent.train", "--resume", str(folder))
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    report = verify(folder / "ledger.sqlite")
    assert report.is_ok, report


@pytest.mark.full
def test_the_quickstart_learns_on_three_nodes(cluster: Any, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    on_ray = ("cluster.kind=ray", f"cluster.address={cluster.address}", f"run_dir={tmp_path / 'run'}")
    done = run_command("areal_agent.train", "--config", "configs/quickstart.yaml", *on_ray)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["success_before"] <= 0.5
    assert summary["success_after"] >= 0.9
