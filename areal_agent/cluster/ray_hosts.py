"""The hosts of a Ray cluster. Ray finds room, starts our command lines there and tells of deaths; it carries no data.

    placement groups   one for the ranks of the trainer, one for each server, one for all workers (spread)
    a process          a `Starter`, an actor of Ray on its bundle, starts it; its output comes here by `Starter.follow`

Ray restarts nothing: whoever started a process asks for a host anew, and gets one wherever Ray has put the bundle by
then. A process ends with its starter, whose end Ray sees to when this process is gone. A node is given up when Ray says
so, or when a starter has not answered for `cluster.lost_after_s`. On a node that is cut off, a starter ends its process
once it has not been asked for three times as long. Processes share no memory, but all machines have the same Python,
working folder, model and shared folder at the same paths: each is looked for before anything starts there.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal_agent.cluster.config import ClusterConfig
from areal_agent.cluster.gang import rank_name
from areal_agent.cluster.hosts import LOCAL, Host, Hosts, Process
from areal_agent.cluster.servers import engine_name, programs_of
from areal_agent.engine.address import Backend, key_of_environment
from areal_agent.engine.config import EngineConfig, EnginePlan
from areal_agent.engine.transport import awake_timeout
from areal_agent.errors import ConfigError, ProcessDied
from areal_agent.gateway.auth import new_key
from areal_agent.process import ManagedProcess, death_of, how_it_ended, last_lines, uninterrupted
from areal_agent.rollout.config import RolloutConfig
from areal_agent.trainer.config import TrainerConfig

FOLLOW_S = 0.2
"""The interval at which a starter looks for new output."""

ANSWERS_A_LIMIT = 4
"""A starter without news answers this often within `cluster.lost_after_s`."""

PIECE_BYTES = 64 * 1024
"""The most output in one answer: from 100 KiB on, Ray puts answers into its object store, which dies with its node."""

LIMITS_A_LEASE = 3
"""A starter that was not asked for this many times `cluster.lost_after_s` ends its process. This is more than one, so
that a run whose own process was blocked for a while loses nothing."""

MAX_TRIES = 3
"""The tries for a host: until Ray has noticed that a node is dead, it may put a starter there."""

ROOM_CALL_S = 1.0
"""How long one call waits for room, and so Ctrl-C for the call."""

PYTHON_PATH = "PYTHONPATH"

BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""At 0, a Ray that is started listens on loopback alone, on every system. Read when Ray is imported."""

NICENESS = "RAY_worker_niceness"
"""The niceness of what a Ray that is started runs; 15 by default."""

TOKEN = "RAY_AUTH_TOKEN"
"""Without it, a Ray that is started makes a token in ~/.ray, which every later `ray start --head` then demands."""

Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The processes of one placement group, by name, with what Ray reserves for each of them.

    Their machines need the files `paths`, besides those that every machine needs.
    """

    names: tuple[str, ...]
    resources: Resources
    strategy: str = "PACK"
    paths: Sequence[str] = ()


def needs_of(
    cluster: ClusterConfig,
    engine: EngineConfig,
    rollout: RolloutConfig,
    trainer: TrainerConfig | None,
    *,
    has_gpus: bool,
) -> Sequence[Need]:
    """Return what a run reserves: a CPU for each thread, and the GPUs of each rank and server that is to use some.

    A server of SGLang or vLLM, with all its shards and replicas, is on one machine. `has_gpus` says whether the cluster
    has any GPUs, which decides where `device` is `auto`.

    >>> needs = needs_of(ClusterConfig(kind="ray"), EngineConfig(), RolloutConfig(workers=2), None, has_gpus=True)
    >>> [(need.names, need.resources) for need in needs]
    [(('engine',), {'CPU': 1, 'GPU': 1}), (('worker 0', 'worker 1'), {'CPU': 1})]
    """

    def amounts(num_threads: int, num_gpus: int, device: str) -> Resources:
        is_on_gpu = device == "cuda" or (device == "auto" and has_gpus)
        return {"CPU": num_threads} | ({"GPU": num_gpus} if is_on_gpu else {})

    needs: list[Need] = []
    if trainer is not None:
        ranks = tuple(map(rank_name, range(trainer.num_ranks)))
        needs.append(Need(names=ranks, resources=amounts(trainer.num_threads, 1, trainer.device)))
    num_gpus = EnginePlan.of(engine).num_gpus
    of_server = amounts(engine.num_threads * num_gpus, num_gpus, engine.device)
    for number in range(engine.num_servers):
        name, paths = engine_name(engine, number), programs_of(engine)
        needs.append(Need(names=(name,), resources=of_server, strategy="STRICT_PACK", paths=paths))
    if rollout.workers:
        names = tuple(f"worker {number}" for number in range(rollout.workers))
        needs.append(Need(names=names, resources=cluster.worker_resources, strategy="SPREAD"))
    return needs


def own_address(network: str | None, of_ray: str) -> str:
    """Return this machine's address in a network; by default the one that Ray uses. Raises ConfigError."""
    if network is None:
        return of_ray
    wanted = ipaddress.ip_network(network)
    family = socket.AF_INET6 if wanted.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((str(next(iter(wanted.hosts()))), 9))  # sends nothing, but chooses the address to send from
        if ipaddress.ip_address(found := probe.getsockname()[0]) in wanted:
            return found
    raise ConfigError(f"cluster.network is {network}, but machine {of_ray} has no address in it; give its network")


# ------------------------------------------------------------------------------------------------ on the node


class Starter:
    """An actor of Ray that starts one process on its node."""

    def __init__(self) -> None:
        self._address = ""
        self._process: ManagedProcess | None = None
        self._is_asked = asyncio.Event()
        self._lease: asyncio.Task[None] | None = None

    async def settle(self, network: str | None, folder: str, paths: Sequence[str]) -> tuple[str, str]:
        """Enter `folder`. Return the node's address, and what makes the node unfit, or an empty text."""
        of_ray: str = importlib.import_module("ray.util").get_node_ip_address()
        if missing := _missing((folder, *paths)):
            return of_ray, f"it has no {', '.join(missing)}"
        os.chdir(folder)
        try:
            self._address = own_address(network, of_ray)
        except ConfigError as error:
            return of_ray, str(error)
        return self._address, ""

    async def free_port(self) -> int:
        """Return a port on which nobody listens now."""
        with socket.create_server((self._address, 0)) as probe:
            return probe.getsockname()[1]

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], lease_s: float) -> None:
        """Start the process, which is followed at least every `lease_s` or ended. Its output goes to a file here."""
        log_path = Path(tempfile.mkdtemp(prefix="areal_agent-log-")) / "log"
        self._process = await ManagedProcess.start(name, argv, log_path=log_path, env=env)
        self._lease = asyncio.create_task(self._end_when_cut_off(lease_s), name=f"lease of {name}")

    async def follow(self, offset: int, wait_s: float) -> tuple[bytes, int | None]:
        """Return the output from `offset` on, and the exit status of a process that has ended.

        Waits at most `wait_s` for news.
        """
        process = self._process
        assert process is not None, "it was started"
        self._is_asked.set()
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

    async def _end_when_cut_off(self, lease_s: float) -> None:
        """End the process once nobody follows it: the run is gone, or has given up this node and started another."""
        with contextlib.suppress(TimeoutError):
            while True:
                self._is_asked.clear()
                async with awake_timeout(lease_s):
                    await self._is_asked.wait()
        if self._process is not None and self._process.is_running:
            await self._process.aclose(with_session=True)


def _missing(paths: Iterable[str]) -> Sequence[str]:
    return [path for path in paths if not os.path.exists(path)]


# ------------------------------------------------------------------------------------------------ on this machine


class RemoteStarter:
    """Calls a starter. `limit_s` is `cluster.lost_after_s`."""

    def __init__(self, ray: Any, actor: Any, limit_s: float) -> None:
        self._ray = ray
        self._actor = actor
        self.limit_s = limit_s

    def tell(self, method: str) -> None:
        """Call without waiting."""
        getattr(self._actor, method).remote()

    async def ask(self, method: str, *arguments: object, extra_s: float = 0.0) -> Any:
        """Call and wait, `extra_s` longer than usual. Raises TimeoutError, and ConnectionError when it is gone."""
        try:
            async with awake_timeout(self.limit_s + extra_s):
                return await getattr(self._actor, method).remote(*arguments)
        except TimeoutError:
            raise TimeoutError(f"its node has not answered for cluster.lost_after_s = {self.limit_s:g}") from None
        except self._ray.exceptions.RayTaskError:  # an error of the method
            raise
        except self._ray.exceptions.RayError as error:
            raise ConnectionError(f"Ray says: {_in_one_line(error):.300}") from None

    def release(self) -> None:
        """End the starter, with what it still runs."""
        self._ray.kill(self._actor)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class RayProcess:
    """A `hosts.Process` on another node."""

    pid = None

    def __init__(self, name: str, log_path: Path, starter: RemoteStarter) -> None:
        self.name = name
        self.log_path = log_path
        self.exit_status: int | None = None
        self._starter = starter
        self._is_lost = False
        self._end = asyncio.create_task(self._follow(), name=f"output of {name}")

    @property
    def is_running(self) -> bool:
        return not self._end.done()

    async def died(self) -> ProcessDied:
        return death_of(self.name, await asyncio.shield(self._end), self.log_path)

    def log_tail(self, num_lines: int = 12) -> str:
        return last_lines(self.log_path, num_lines)

    def kill(self) -> None:
        self._starter.tell("kill")

    async def aclose(self, grace_s: float = 5.0, *, with_session: bool = False) -> None:
        if self.is_running or (with_session and not self._is_lost):
            with contextlib.suppress(OSError):
                await self._starter.ask("end", grace_s, with_session, extra_s=grace_s)
                await asyncio.wait({self._end}, timeout=grace_s)  # for its last output
        self._starter.release()
        self._end.cancel()
        await asyncio.wait({self._end})

    async def _follow(self) -> str:
        """Bring the output here until the process has ended; say how it did."""
        offset, status = 0, None
        with self.log_path.open("ab") as log:
            try:
                while status is None:
                    wait_s = self._starter.limit_s / ANSWERS_A_LIMIT
                    output, status = await self._starter.ask("follow", offset, wait_s)
                    offset += log.write(output)
                    log.flush()
            except OSError as error:
                self._is_lost = True
                return f"is lost: {_in_one_line(error)}"
        self.exit_status = status
        return how_it_ended(status)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayHost:
    """A `hosts.Host`: one bundle, wherever Ray has put it."""

    starter: RemoteStarter
    address: str
    home: str

    async def free_port(self) -> int:
        return await self.starter.ask("free_port")

    async def start(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        variables = dict(env or {})
        if PYTHON_PATH in os.environ:
            variables[PYTHON_PATH] = os.environ[PYTHON_PATH]
        try:
            lease_s = LIMITS_A_LEASE * self.starter.limit_s
            await self.starter.ask("start", name, list(argv), variables, lease_s)
        except OSError as error:
            self.starter.release()
            raise ProcessDied(f"the {name} process could not be started: {_in_one_line(error)}") from None
        return RayProcess(name, log_path, self.starter)


class RayHosts:
    """The `hosts.Hosts` of a Ray cluster. Made by `open_hosts`."""

    chooses_gpus = True  # by CUDA_VISIBLE_DEVICES

    def __init__(self, ray: Any, config: ClusterConfig, home: str, paths: Sequence[str]) -> None:
        """`paths` have to be on every machine."""
        self._key = key_of_environment() or new_key()
        self._ray = ray
        self._config = config
        self._home = home
        self._paths = paths
        self._groups: dict[str, tuple[Any, int, Need]] = {}  # of the process with that name, its bundle there

    async def reserve(self, needs: Sequence[Need]) -> None:
        """Reserve a bundle for each process, all at once. Raises ConfigError that names what found no room."""
        limit_s = self._config.placement_timeout_s
        for need in await self._without_room(needs, limit_s):
            free = {name: amount for name, amount in self._ray.available_resources().items() if ":" not in name}
            raise ConfigError(
                f"cluster: Ray found no room for {', '.join(need.names)} with {dict(need.resources)} each within "
                f"cluster.placement_timeout_s = {limit_s:g}; free are {free}: add nodes, or ask for less"
            )

    async def have_room(self, needs: Sequence[Need]) -> bool:
        """Return whether Ray finds room for all processes at once, while no bundle is reserved.

        Where the cluster is large enough, it has `cluster.lost_after_s` to do so: what has died gives back late.
        """
        total = self._ray.cluster_resources()
        if any(_sum_of(needs, name) > total.get(name, 0.0) for need in needs for name in need.resources):
            return False
        without = await self._without_room(needs, self._config.lost_after_s)
        self.give_back()
        return not without

    async def _without_room(self, needs: Sequence[Need], limit_s: float) -> Sequence[Need]:
        """Reserve a bundle for each process; return the groups for which there is no room within the limit."""
        groups: list[Any] = []
        for need in needs:
            groups.append(self._ray.util.placement_group([dict(need.resources) for _ in need.names], need.strategy))
            self._groups |= {name: (groups[-1], index, need) for index, name in enumerate(need.names)}
        ready = await asyncio.gather(*(_gets_room(group, limit_s) for group in groups))
        return [need for need, is_ready in zip(needs, ready, strict=True) if not is_ready]

    @property
    def has_gpus(self) -> bool:
        return self._ray.cluster_resources().get("GPU", 0) > 0

    def give_back(self) -> None:
        """Give all bundles back, which ends what is left in them."""
        groups, self._groups = self._groups, {}
        for group in {id(group): group for group, _, _ in groups.values()}.values():
            self._ray.util.remove_placement_group(group)

    def engine_key(self, backend: Backend) -> str:
        return self._key

    async def host_for(self, name: str) -> Host:
        limit_s = self._config.placement_timeout_s
        why = ""
        for _ in range(MAX_TRIES):
            starter = self._new_starter(name)
            try:
                network, paths = _text(self._config.network), [*self._paths, *self._groups[name][2].paths]
                address, fault = await starter.ask("settle", network, os.getcwd(), paths, extra_s=limit_s)
            except OSError as error:
                starter.release()
                if isinstance(error, TimeoutError):
                    why = f"none had room within cluster.placement_timeout_s = {limit_s:g}"
                    break
                why = str(error)
                continue
            if not fault:
                return RayHost(starter=starter, address=address, home=self._home)
            starter.release()
            raise ConfigError(
                f"cluster: machine {address}, where Ray has put the {name}, is not like this one: {fault}; every "
                "machine needs the same Python, working folder, model and cluster.shared_dir, or else run_dir, at the "
                "same paths, and where engines run engine.python"
            )
        raise ProcessDied(f"there is no node for the {name} with {dict(self._groups[name][2].resources)}: {why}")

    def _new_starter(self, name: str) -> RemoteStarter:
        group, index, need = self._groups[name]
        strategies = self._ray.util.scheduling_strategies
        amounts = dict(need.resources)
        actor_class = self._ray.remote(Starter).options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            resources=amounts,
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, index),
        )
        return RemoteStarter(self._ray, actor_class.remote(), self._config.lost_after_s)


async def _gets_room(group: Any, limit_s: float) -> bool:
    """Return whether a placement group has room within the limit.

    It is asked in short calls: no thread can be cancelled, and one that still waits when Ray is left ends this process.
    """
    for _ in range(math.ceil(limit_s / ROOM_CALL_S)):
        if await uninterrupted(asyncio.to_thread(group.wait, min(limit_s, ROOM_CALL_S))):
            return True
    return False


def _text(network: object) -> str | None:
    return None if network is None else str(network)


def require_ray() -> None:
    """Raise ConfigError when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "cluster.kind is 'ray', which needs the package ray; pip install 'areal-agent[ray]', or leave cluster out"
        )


@asynccontextmanager
async def open_hosts(
    cluster: ClusterConfig,
    engine: EngineConfig,
    rollout: RolloutConfig,
    trainer: TrainerConfig | None = None,
    *,
    shared: Iterable[Path] = (),
) -> AsyncGenerator[Hosts]:
    """Open the machines of a run, with room for its processes; without `trainer`, for all but that one.

    `shared` are files and folders that every machine has to have. Raises ConfigError.
    """
    if cluster.kind == "local":
        yield LOCAL
        return
    require_ray()
    needs = partial(needs_of, cluster, engine, rollout, trainer)
    async with _open_cluster(cluster, needs(has_gpus=False), shared) as hosts:
        await hosts.reserve(needs(has_gpus=hosts.has_gpus))
        yield hosts


async def ranks_that_fit(
    cluster: ClusterConfig, engine: EngineConfig, rollout: RolloutConfig, trainer: TrainerConfig
) -> int:
    """Return the largest size of a trainer for which a Ray cluster has room now, beside the other processes of its run.

    Without room for any it is the smallest: a start then waits for it, and says what is missing. Raises ConfigError.
    """
    size = trainer.num_ranks
    if cluster.address is None:  # the Ray that is started there is as large as the config asks
        return size
    async with _open_cluster(cluster, (), ()) as hosts:
        for size in trainer.sizes():
            smaller = trainer.of_size(size)
            if await hosts.have_room(needs_of(cluster, engine, rollout, smaller, has_gpus=hosts.has_gpus)):
                break
    return size


@asynccontextmanager
async def _open_cluster(
    cluster: ClusterConfig, needs: Sequence[Need], shared: Iterable[Path]
) -> AsyncGenerator[RayHosts]:
    """Connect to the cluster. `needs` says how large one has to be that is started here."""
    if cluster.address is None:
        for variable in (BEYOND_LOOPBACK, NICENESS):
            os.environ.setdefault(variable, "0")
        os.environ.setdefault(TOKEN, new_key())
    ray, is_over = importlib.import_module("ray"), threading.Event()
    try:
        await _connected(ray, cluster, needs, is_over)
        home = own_address(_text(cluster.network), ray.util.get_node_ip_address())
        hosts = RayHosts(ray, cluster, home, [sys.executable, *map(os.path.abspath, shared)])
        try:
            yield hosts
        finally:
            hosts.give_back()
    finally:
        if ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)
        is_over.set()


async def _connected(ray: Any, config: ClusterConfig, needs: Sequence[Need], is_over: threading.Event) -> None:
    """Connect to the cluster, or start one on this machine. Raises ConfigError, also when that takes too long.

    Ray gets a thread, because in the main one it would take SIGTERM. It cannot be cancelled: where half of a cluster
    answers, it waits for ever, and is left behind. What it starts ends with this thread, so that lives until `is_over`.
    """
    done: Future[None] = Future()

    def connect() -> None:
        try:
            _connect(ray, config, needs)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
            is_over.wait()

    threading.Thread(target=connect, name="connect to Ray", daemon=True).start()
    outcome, limit_s = asyncio.wrap_future(done), config.placement_timeout_s
    outcome.add_done_callback(asyncio.Future.exception)  # looked at, also when somebody ends the command meanwhile
    await uninterrupted(asyncio.wait({outcome}, timeout=limit_s))  # Ray ends a process that leaves it half connected
    if not outcome.done():
        raise ConfigError(
            f"cluster.address is {config.address!r}, and Ray has not let the run in within cluster.placement_timeout_s "
            f"= {limit_s:g}: see whether `ray status` answers here, with the same RAY_AUTH_MODE"
        )
    outcome.result()


def _connect(ray: Any, config: ClusterConfig, needs: Sequence[Need]) -> None:
    """Connect to the cluster, or start one on this machine. Raises ConfigError."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if config.address is None:
        names = {name for need in needs for name in need.resources} - {"CPU", "GPU"}
        options |= {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(_sum_of(needs, "CPU"))),  # as many as the config asks for
            "resources": {name: _sum_of(needs, name) for name in names},
            "include_dashboard": False,
        }
    try:
        ray.init(address=config.address or "local", **options)
    except Exception as error:  # Ray raises errors of many kinds
        raise ConfigError(
            f"cluster.address is {config.address!r}, and Ray could not "
            f"{'be reached there' if config.address else 'start on this machine'}: {_in_one_line(error)}"
        ) from error


def _sum_of(needs: Sequence[Need], name: str) -> float:
    return sum(len(need.names) * need.resources.get(name, 0.0) for need in needs)
