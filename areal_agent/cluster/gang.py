"""The processes of a trainer, one for each rank. They are started on hosts of their own, are watched, and end together.

    main ── start ─▶ rank 0 ── how the others have to be started ─▶ main ── start ─▶ ranks 1, 2, ...
      └─ commands (trainer/client.py) ─▶ rank 0 ◀─ call ─ ranks 1, 2, ...

No rank is started again alone: the others cannot go on without it. A rank that failed a command, or that rank 0 has
left, exits with 0, and rank 0 tells of the cause. Every other end of a rank is a death of the trainer.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from areal_agent.cluster.hosts import LOCAL, Hosts, Process
from areal_agent.cluster.local import called, start_child, thread_variables
from areal_agent.errors import ProcessDied, TrainerDied
from areal_agent.trainer.client import TrainerClient
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.wire import RankCall, TrainerInfo

PROGRAM = (sys.executable, "-m", "areal_agent.trainer")


def rank_name(number: int) -> str:
    """Return the name of the process of a rank."""
    return f"trainer rank {number}" if number else "trainer"


async def start_rank(number: int, call: RankCall, num_threads: int, logs: Path, hosts: Hosts = LOCAL) -> Process:
    """Start a rank other than 0, which calls rank 0 as `call` says. Raises TrainerDied where there is no host."""
    name = rank_name(number)
    argv = [*PROGRAM, f"--rank={number}", *call.options]
    variables = {**thread_variables(num_threads), **call.variables}
    try:
        host = await hosts.host_for(name)
        argv += ["--address", host.address]
        return await host.start(name, argv, log_path=logs / f"trainer-rank-{number}.log", env=variables)
    except ProcessDied as error:
        raise TrainerDied(str(error)) from None


class Gang:
    """The processes of one trainer, and the client of rank 0. Made by `start_trainer`."""

    def __init__(self, rank_0: Process, client: TrainerClient, num_threads: int, logs: Path, hosts: Hosts) -> None:
        self.client = client
        self.processes: list[Process] = []
        self._num_threads = num_threads
        self._logs = logs
        self._hosts = hosts
        self._death: asyncio.Future[TrainerDied] = asyncio.get_running_loop().create_future()
        self._watchers: list[asyncio.Task[None]] = []
        self._add(0, rank_0)

    async def init(self, setup: TrainerSetup) -> TrainerInfo:
        """Start the other ranks and load the model.

        Raises ConfigError for a model or a device that cannot be used, TrainerDied when a rank dies.
        """
        if setup.trainer.num_ranks > 1:
            calls = await self.client.expect(setup.trainer.num_ranks)
            try:
                async with asyncio.TaskGroup() as group:
                    for number, call in enumerate(calls, start=1):
                        group.create_task(self._start(number, call))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return await self.client.init(setup)

    async def died(self) -> TrainerDied:
        """Wait until a rank dies; return an error with its name, the cause and its last lines."""
        return await asyncio.shield(self._death)

    @property
    def process_ids(self) -> Mapping[str, int]:
        """The ids of processes on this machine: `trainer`, `trainer_rank1`, ..."""
        return {one.name.replace(" rank ", "_rank"): one.pid for one in self.processes if one.pid is not None}

    async def aclose(self) -> None:
        """End all ranks."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.wait(self._watchers)
        await self.client.aclose()
        await asyncio.gather(*(process.aclose() for process in self.processes))

    async def _start(self, number: int, call: RankCall) -> None:
        self._add(number, await start_rank(number, call, self._num_threads, self._logs, self._hosts))

    def _add(self, number: int, process: Process) -> None:
        self.processes.append(process)
        self._watchers.append(asyncio.create_task(self._watch(number, process), name=f"watcher of {process.name}"))

    async def _watch(self, number: int, process: Process) -> None:
        death = TrainerDied(str(await process.died()))
        if (number == 0 or process.exit_status != 0) and not self._death.done():
            self._death.set_result(death)
            self.client.fail(death)  # rank 0 may wait for that rank, and would not answer


@asynccontextmanager
async def start_trainer(num_threads: int, logs: Path, hosts: Hosts = LOCAL) -> AsyncGenerator[Gang]:
    """Start rank 0 of a trainer; `Gang.init` starts the others. All are ended on leaving.

    Raises TrainerDied where there is no host.
    """
    name = rank_name(0)
    try:
        host = await hosts.host_for(name)
        argv = [*PROGRAM, "--address", host.address]
        process, callback = await start_child(host, name, argv, logs / "trainer.log", thread_variables(num_threads))
    except ProcessDied as error:
        raise TrainerDied(str(error)) from None
    gang = Gang(process, TrainerClient(partial(called, process, callback)), num_threads, logs, hosts)
    try:
        yield gang
    finally:
        await gang.aclose()
        callback.close()
