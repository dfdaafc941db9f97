"""The hosts of a Ray cluster. Ray finds room, starts our command lines there and tells of deaths; it carries no data.

    placement groups   one bundle for the trainer with all its ranks, one for each engine, one for each worker (spread)
    a process          an `Agent`, an actor of Ray on its bundle, starts it; its output comes here by `Agent.follow`

Ray restarts nothing: whoever started a process asks for a host anew, and gets one wherever Ray has put the bundle by
then. A process ends with its agent, whose end Ray sees to when this process is gone. A node is given up when Ray says
so, or when its agent has not answered for `cluster.lost_after_s`.
"""

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import math
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.hosts import LOCAL, LOOPBACK, Host, Hosts, Process
from areal_agent.cluster.servers import engine_name
from areal_agent.engine.config import VISIBLE_GPUS, EngineConfig
from areal_agent.errors import ConfigError, ProcessDied
from areal_agent.gateway.auth import new_key
from areal_agent.process import ManagedProcess, death_of, how_it_ended, last_lines
from areal_agent.rollout.config import RolloutConfig
from areal_agent.trainer.config import TrainerConfig

FOLLOW_S = 0.2
"""The interval at which an agent looks for new output."""

ANSWERS_A_LIMIT = 4
"""An agent without news answers this often within `cluster.lost_after_s`."""

PIECE_BYTES = 2**20

PYTHON_PATH = "PYTHONPATH"

Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The processes of one placement group, by name, with what each of them reserves."""

    names: tuple[str, ...]
    resources: Resources
    strategy: str = "PACK"


def needs_of(
    cluster: ClusterConfig, engine: EngineConfig, rollout: RolloutConfig, trainer: TrainerConfig | None = None
) -> list[Need]:
    """Return what a run reserves. Threads are CPUs; with `device: cuda` each rank and each engine has a GPU.

    >>> [need.names for need in needs_of(ClusterConfig(kind="ray"), EngineConfig(), RolloutConfig(workers=2))]
    [('engine',), ('worker 0', 'worker 1')]
    """
    needs: list[Need] = []
    if trainer is not None:
        ranks = trainer.num_ranks
        needs.append(Need(names=("trainer",), resources=_amounts(trainer.threads * ranks, ranks, trainer.device)))
    names = (engine_name(engine, number) for number in range(engine.num_servers))
    needs += [Need(names=(name,), resources=_amounts(engine.threads, 1, engine.device)) for name in names]
    if rollout.workers:
        names = tuple(f"worker {number}" for number in range(rollout.workers))
        needs.append(Need(names=names, resources=cluster.worker_resources, strategy="SPREAD"))
    return needs


def _amounts(num_cpus: int, num_gpus: int, device: str) -> Resources:
    return {"CPU": num_cpus} | ({"GPU": num_gpus} if device == "cuda" else {})


def own_address(network: str | None, of_ray: str) -> str:
    """Return this machine's address in a network; by default the one that Ray uses. Raises ConfigError."""
    if network is None:
        return of_ray
    wanted = ipaddress.ip_network(network)
    family = socket.AF_INET6 if wanted.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((str(wanted[1]), 9))  # sends nothing, but chooses the address from which it would
        if ipaddress.ip_address(found := probe.getsockname()[0]) in wanted:
            return found
    raise ConfigError(f"cluster.network is {network}, but machine {of_ray} has no address in it; give its network")


class Agent:
    """An actor of Ray that starts one process on its node, in the folder in which the run was started."""

    def __init__(self, folder: str, network: str | None) -> None:
        os.chdir(folder)
        of_ray: str = importlib.import_module("ray.util").get_node_ip_address()
        self._address = own_address(network, of_ray)
        self._process: ManagedProcess | None = None

    async def address(self) -> str:
        """Return the address of its node."""
        return self._address

    async def free_port(self) -> int:
        """Return a port on which nobody listens now."""
        with socket.create_server((self._address, 0)) as probe:
            return probe.getsockname()[1]

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process. Its output goes to a file of the node."""
        log_path = Path(tempfile.mkdtemp(prefix="areal_agent-log-")) / "log"
        self._process = await ManagedProcess.start(name, argv, log_path=log_path, env=env)

    async def follow(self, offset: int, wait_s: float) -> tuple[bytes, int | None]:
        """Return the output from `offset` on, and the exit status of a process that has ended.

        Waits at most `wait_s` for news.
        """
        process = self._process
        assert process is not None, "it was started"
        for _ in range(max(1, int(wait_s / FOLLOW_S))):
            status = process.exit_status  # before the output, which is then complete
            with process.log_path.open("rb") as log:
                log.seek(offset)
                output = log.read(PIECE_BYTES)
            if len(output) < PIECE_BYTES and status is not None:
                shutil.rmtree(process.log_path.parent, ignore_errors=True)
                return output, status
            if output:
                return output, None
            await asyncio.sleep(FOLLOW_S)
        return b"", None

    async def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None, "it was started"
        self._process.kill()

    async def end(self, grace_s: float, with_session: bool) -> None:
        """End the process like `ManagedProcess.aclose`."""
        if self._process is not None:
            await self._process.aclose(grace_s, with_session=with_session)


class RayProcess:
    """A `hosts.Process` on another node."""

    pid = None

    def __init__(self, name: str, log_path: Path, agent: "_Handle", address: str) -> None:
        self.name = name
        self.log_path = log_path
        self._agent = agent
        self._address = address
        self._end = asyncio.create_task(self._follow(), name=f"output of {name}")

    @property
    def is_running(self) -> bool:
        return not self._end.done()

    async def died(self) -> ProcessDied:
        return death_of(self.name, await asyncio.shield(self._end), self.log_path)

    def log_tail(self, num_lines: int = 12) -> str:
        return last_lines(self.log_path, num_lines)

    def kill(self) -> None:
        self._agent.tell("kill")

    async def aclose(self, grace_s: float = 5.0, *, with_session: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            if self.is_running or with_session:
                await self._agent.ask("end", grace_s, with_session, extra_s=grace_s)
            await asyncio.wait({self._end}, timeout=grace_s)  # for its last output
        self._agent.release()
        self._end.cancel()
        await asyncio.wait({self._end})

    async def _follow(self) -> str:
        """Bring the output here until the process has ended; say how it did."""
        offset, status = 0, None
        with self.log_path.open("ab") as log:
            try:
                while status is None:
                    output, status = await self._agent.ask("follow", offset, self._agent.limit_s / ANSWERS_A_LIMIT)
                    offset += log.write(output)
                    log.flush()
            except ConnectionError as error:
                return f"is lost: {error}"
        return how_it_ended(status)


class _Handle:
    """Calls an agent. ConnectionError means that its node or the agent is gone."""

    def __init__(self, ray: Any, actor: Any, limit_s: float) -> None:
        self._ray = ray
        self._actor = actor
        self.limit_s = limit_s

    def tell(self, method: str) -> None:
        """Call without waiting."""
        getattr(self._actor, method).remote()

    async def ask(self, method: str, *arguments: object, extra_s: float = 0.0) -> Any:
        """Call and wait, no longer than `cluster.lost_after_s` and `extra_s`."""
        try:
            async with asyncio.timeout(self.limit_s + extra_s):
                return await getattr(self._actor, method).remote(*arguments)
        except TimeoutError:
            raise ConnectionError(f"its node has not answered for cluster.lost_after_s = {self.limit_s:g}") from None
        except self._ray.exceptions.RayActorError as error:
            raise ConnectionError(f"Ray says that {' '.join(str(error).split())}") from None

    def release(self) -> None:
        """End the agent, with what it still runs."""
        self._ray.kill(self._actor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayHost:
    """A `hosts.Host`: one bundle, wherever Ray has put it."""

    agent: _Handle
    address: str
    home: str

    async def free_port(self) -> int:
        return await self.agent.ask("free_port")

    async def start(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        variables = {name: value for name, value in (env or {}).items() if name != VISIBLE_GPUS}  # Ray chooses GPUs
        if PYTHON_PATH in os.environ:
            variables[PYTHON_PATH] = os.environ[PYTHON_PATH]
        try:
            await self.agent.ask("start", name, list(argv), variables)
        except ConnectionError as error:
            raise ProcessDied(f"the {name} process could not be started: {error}") from None
        return RayProcess(name, log_path, self.agent, self.address)


class RayHosts:
    """The `hosts.Hosts` of a Ray cluster. Made by `open_ray`."""

    def __init__(self, ray: Any, config: ClusterConfig, home: str, groups: Mapping[str, tuple[Any, int, Need]]) -> None:
        self.engine_key = None if config.address is None else new_key()
        self._ray = ray
        self._config = config
        self._home = home
        self._groups = groups  # by the name of a process: its group, its bundle, and its need

    async def host_for(self, name: str) -> Host:
        group, index, need = self._groups[name]
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        amounts = dict(need.resources)
        actor_class = self._ray.remote(Agent).options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            resources=amounts,
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, index),
        )
        agent = _Handle(
            self._ray, actor_class.remote(os.getcwd(), _text(self._config.network)), self._config.lost_after_s
        )
        try:
            address = await agent.ask("address", extra_s=self._config.placement_timeout_s)
        except ConnectionError as error:
            agent.release()
            raise ProcessDied(f"there is no host for the {name}: {error}; it needs {dict(need.resources)}") from None
        return RayHost(agent=agent, address=address, home=self._home)


def _text(network: object) -> str | None:
    return None if network is None else str(network)


def require_ray() -> Any:
    """Return the package. Raises ConfigError when it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError(
            "cluster.kind is 'ray', which needs the package ray; pip install 'areal_agent[ray]', or leave cluster out"
        ) from None


@asynccontextmanager
async def open_ray(config: ClusterConfig, needs: Sequence[Need]) -> AsyncGenerator[RayHosts]:
    """Connect to a cluster, or start one on this machine, and reserve what is needed. Raises ConfigError."""
    ray = require_ray()
    await asyncio.to_thread(_connect, ray, config, needs)
    try:
        home = own_address(_text(config.network), ray.util.get_node_ip_address())
        groups = await _reserve(ray, config, needs)
        try:
            yield RayHosts(ray, config, home, groups)
        finally:
            for group in {id(group): group for group, _, _ in groups.values()}.values():
                ray.util.remove_placement_group(group)
    finally:
        await asyncio.to_thread(ray.shutdown)


def _connect(ray: Any, config: ClusterConfig, needs: Sequence[Need]) -> None:
    """Runs in a thread, for in the main thread Ray would take over SIGTERM."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if config.address is None:
        names = {name for need in needs for name in need.resources} - {"CPU", "GPU"}
        options |= {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(_sum_of(needs, "CPU"))),  # as many as the config asks for
            "resources": {name: _sum_of(needs, name) for name in names},
            "include_dashboard": False,
        }
        options |= {"_node_ip_address": LOOPBACK}  # whoever reaches a cluster may run programs there
    try:
        ray.init(address=config.address or "local", **options)
    except Exception as error:  # Ray raises errors of many kinds
        raise ConfigError(
            f"cluster.address is {config.address!r}, where Ray cannot be reached or started: "
            f"{' '.join(str(error).split())}"
        ) from error


def _sum_of(needs: Sequence[Need], name: str) -> float:
    return sum(len(need.names) * need.resources.get(name, 0.0) for need in needs)


async def _reserve(ray: Any, config: ClusterConfig, needs: Sequence[Need]) -> dict[str, tuple[Any, int, Need]]:
    """Reserve a bundle for each process, all at once. Raises ConfigError that names what found no room."""
    groups = [ray.util.placement_group([dict(one.resources) for _ in one.names], one.strategy) for one in needs]
    ready = await asyncio.gather(*(asyncio.to_thread(group.wait, config.placement_timeout_s) for group in groups))
    for need, is_ready in zip(needs, ready, strict=True):
        if not is_ready:
            free = {name: amount for name, amount in ray.available_resources().items() if ":" not in name}
            raise ConfigError(
                f"cluster: Ray found no room for {', '.join(need.names)} with {dict(need.resources)} each within "
                f"cluster.placement_timeout_s = {config.placement_timeout_s:g}; free are {free}: add nodes, or ask "
                "for less"
            )
    return {
        name: (group, index, need)
        for group, need in zip(groups, needs, strict=True)
        for index, name in enumerate(need.names)
    }


@asynccontextmanager
async def open_hosts(
    cluster: ClusterConfig, engine: EngineConfig, rollout: RolloutConfig, trainer: TrainerConfig | None = None
) -> AsyncGenerator[Hosts]:
    """Open the machines of a run, with room for its processes; without `trainer`, for all but that one.

    Raises ConfigError.
    """
    if cluster.kind == "local":
        yield LOCAL
        return
    async with open_ray(cluster, needs_of(cluster, engine, rollout, trainer)) as hosts:
        yield hosts
