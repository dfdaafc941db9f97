"""What runs on a Ray cluster, without Ray (test_ray.py has a real one).

- A config that a cluster does not support yet is refused, and so is a key that only a cluster has.
- A run reserves a CPU for each thread and, where there are GPUs, those of each rank and server, which has all of its
  own on one machine.
- A process's output comes here whole and in order; its end and the loss of its node are told apart.
- An address is found in a network, or the machine is named that has none.
- Waiting for room that is cancelled leaves no call of Ray behind. A cluster that answers by halves is given up.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.ray_hosts import (
    PIECE_BYTES,
    Need,
    RayHosts,
    RayProcess,
    RemoteStarter,
    Starter,
    needs_of,
    open_hosts,
    own_address,
)
from areal_agent.config import Config
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.sglang import SGLANG_LAUNCHER
from areal_agent.errors import ConfigError
from areal_agent.rollout.config import RolloutConfig
from areal_agent.trainer.config import TrainerConfig

RUN = {"model": "tiny", "workflow": "a:b", "tasks": "c:d"}
SGLANG = {"backend": "sglang", "python": "p"}


def test_weights_go_over_disk_in_a_cluster() -> None:
    assert Config.parse({**RUN, "cluster": {"kind": "ray"}}).trainer.transfer == "disk"
    assert Config.parse(RUN).trainer.transfer == "shared_memory"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"trainer": {"transfer": "shared_memory"}}, "'shared_memory', .* set it to 'disk' or 'distributed'"),
        ({"trainer": {"transfer": "distributed", "transfer_host": "10.0.0.1"}}, "transfer_host is '10.0.0.1', .* out"),
        ({"engine": {"urls": ["http://a:1"]}}, r"engine.urls is \('http://a:1',\), .* servers are started there"),
        ({"engine": {**SGLANG, "server_args": ["--base-gpu-id=2"]}}, "--base-gpu-id out: Ray chooses the GPUs"),
        (
            {"engine": {**SGLANG, "server_args": ["--tokenizer-worker-num", "2"]}},
            "--tokenizer-worker-num out: .* no key",
        ),
        ({"engine": {"device": "cuda", "first_gpu": 1}}, "engine.first_gpu is 1, .* Ray chooses the GPUs"),
        ({"engine": {"release_kv": True}}, "engine.release_kv is True, .* leave it out"),
        ({"cluster": {"kind": "ray", "network": "10.0.0.0/16"}}, "cluster.network only applies with cluster.address"),
        ({"cluster": {"kind": "ray", "address": "ray://head:10001"}}, "cluster.address is 'ray://head:10001'"),
        ({"cluster": {"kind": "ray", "worker_resources": {"CPU": 1.5}}}, "fractions of 1 and whole numbers"),
        ({"cluster": {"kind": "ray", "worker_resources": {}}}, "cluster.worker_resources is {}"),
        ({"cluster": {"address": "head:6379"}}, "cluster.address only applies to cluster.kind ray"),
    ],
)
def test_what_is_not_supported_is_refused(values: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Config.parse({**RUN, "cluster": {"kind": "ray"}, **values})


@pytest.mark.parametrize(
    ("device", "has_gpus", "of_trainer"),
    [("auto", False, {"CPU": 3}), ("auto", True, {"CPU": 3, "GPU": 1}), ("cpu", True, {"CPU": 3})],
)
def test_what_is_reserved(device: str, has_gpus: bool, of_trainer: dict[str, float]) -> None:
    needs = needs_of(
        ClusterConfig(kind="ray", worker_resources={"CPU": 4, "sandbox": 1}),
        EngineConfig(num_servers=2, threads=5, device="cpu"),
        RolloutConfig(workers=2),
        TrainerConfig(num_ranks=2, threads=3, device=device),
        has_gpus=has_gpus,
    )
    assert [(need.names, need.resources, need.strategy) for need in needs] == [
        (("trainer", "trainer rank 1"), of_trainer, "PACK"),
        (("engine 0",), {"CPU": 5}, "STRICT_PACK"),
        (("engine 1",), {"CPU": 5}, "STRICT_PACK"),
        (("worker 0", "worker 1"), {"CPU": 4, "sandbox": 1}, "SPREAD"),
    ]


def test_a_server_of_several_gpus_is_placed_whole_where_its_programs_are() -> None:
    engine = EngineConfig(**SGLANG, threads=2, server_args=("--tp-size=4", "--dp-size", "2"))
    (need,) = needs_of(ClusterConfig(kind="ray"), engine, RolloutConfig(), None, has_gpus=True)
    assert (need.names, need.resources, need.strategy) == (("engine",), {"CPU": 16, "GPU": 8}, "STRICT_PACK")
    assert need.paths == (str(Path("p").absolute()), str(SGLANG_LAUNCHER))


class Node(RemoteStarter):
    """A starter in this process, until its node is lost."""

    limit_s = 60.0

    def __init__(self) -> None:
        self.starter = Starter()
        self.loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_released = False
        self._told: set[asyncio.Task[None]] = set()

    def tell(self, method: str) -> None:
        self._told.add(asyncio.create_task(getattr(self.starter, method)()))

    async def ask(self, method: str, *arguments: object, extra_s: float = 0.0) -> Any:
        call = asyncio.ensure_future(getattr(self.starter, method)(*arguments))
        await asyncio.wait({call, self.loss}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            raise ConnectionError("its node has died")
        return call.result()

    def release(self) -> None:
        self.is_released = True


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    yield node
    await node.starter.end(0.0, True)


async def run_on(node: Node, log_path: Path, *argv: str) -> RayProcess:
    await node.ask("start", "engine", argv, {"WORD": "hello"}, 60.0)
    return RayProcess("engine", log_path, node)


async def test_output_and_exit_status_come_here(node: Node, tmp_path: Path) -> None:
    process = await run_on(node, tmp_path / "log", "sh", "-c", "echo $WORD; exit 3")
    assert "the engine process exited with 3" in str(await process.died())
    assert (tmp_path / "log").read_text() == "hello\n"
    await process.aclose()
    assert node.is_released


async def test_more_output_than_one_answer_takes(node: Node, tmp_path: Path) -> None:
    program = f"import sys; sys.stdout.write(''.join(f'{{n:07}}\\n' for n in range({PIECE_BYTES // 4})))"
    process = await run_on(node, tmp_path / "log", sys.executable, "-c", program)
    await process.died()
    lines = (tmp_path / "log").read_text().split()
    assert [int(line) for line in lines] == list(range(PIECE_BYTES // 4))  # 8 bytes each: two pieces
    await process.aclose()


async def test_one_that_is_killed(node: Node, tmp_path: Path) -> None:
    process = await run_on(node, tmp_path / "log", "sleep", "100000")
    process.kill()
    assert "was killed by SIGKILL" in str(await process.died())
    await process.aclose()


async def test_one_that_is_ended_is_gone(node: Node, tmp_path: Path) -> None:
    process = await run_on(node, tmp_path / "log", "sleep", "100000")
    assert process.is_running
    await process.aclose()
    assert "was killed by SIGTERM" in str(await process.died())


async def test_the_loss_of_a_node_is_a_death(node: Node, tmp_path: Path) -> None:
    process = await run_on(node, tmp_path / "log", "sleep", "100000")
    node.loss.set_result(None)
    assert "the engine process is lost: its node has died" in str(await process.died())
    await process.aclose(with_session=True)
    assert node.is_released


def test_an_address_in_a_network() -> None:
    assert own_address(None, "10.1.2.3") == "10.1.2.3"
    assert own_address("127.0.0.0/8", "10.1.2.3") == "127.0.0.1"
    assert own_address("127.0.0.1/32", "10.1.2.3") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"198\.51\.100\.0/24, but machine 10\.1\.2\.3 has no address in it"):
        own_address("198.51.100.0/24", "10.1.2.3")  # a network for documentation, which no machine is in


class Full:
    """A placement group for which there is no room."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.num_waiting = 0

    def wait(self, limit_s: float) -> bool:
        self.num_waiting += 1
        self.is_asked.set()
        threading.Event().wait(limit_s)
        self.num_waiting -= 1
        return False


async def test_waiting_for_room_that_is_cancelled_leaves_no_call_behind() -> None:
    group = Full()
    ray = SimpleNamespace(util=SimpleNamespace(placement_group=lambda *_: group))
    hosts = RayHosts(ray, ClusterConfig(kind="ray"), "127.0.0.1", [])
    waiting = asyncio.create_task(hosts.reserve([Need(names=("engine",), resources={"CPU": 1})]))
    await asyncio.to_thread(group.is_asked.wait)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert group.num_waiting == 0


async def test_a_cluster_that_lets_nobody_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    ray = SimpleNamespace(__spec__=object(), init=lambda **_: is_over.wait(), is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    config = ClusterConfig(kind="ray", address="127.0.0.1:1", placement_timeout_s=0.05)
    with pytest.raises(ConfigError, match=r"'127\.0\.0\.1:1', and Ray has not let the run in within .* = 0\.05: see"):
        async with open_hosts(config, EngineConfig(), RolloutConfig()):
            pass
    is_over.set()
