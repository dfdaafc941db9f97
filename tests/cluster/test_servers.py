"""Server processes that are started and kept alive, with programs that do nothing.

- One that dies is started again where it was; others are left alone.
- One that dies too often is given up: three deaths within a minute of service, starts not counted as service. When all
  are given up, the failure says how the last one died, and no process is left.
- One that does not start is an error at the start; at the end no process is left.
- They are ended all at once: each may take seconds.
- Embedded engines know how many others share their memory, on the machine or on a GPU.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from areal_agent.cluster.servers import DeathCount, KeptServer, KeptServers, command_of, keep_servers
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import EngineUnreachable, ProcessDied
from areal_agent.process import ManagedProcess
from areal_agent.types import WeightVersion

DEADLINE_S = 120.0  # only a hang is longer

MakeServer = Callable[..., KeptServer]


@pytest.fixture
def make(tmp_path: Path) -> MakeServer:
    """A server that is a shell script; it serves when it says so in its log, or dies."""

    def making(
        name: str,
        script: str = "echo serving; exec sleep 100000",
        end: Callable[[ManagedProcess], Awaitable[None]] = ManagedProcess.aclose,
    ) -> KeptServer:
        log = tmp_path / f"{name}.log"

        async def start() -> ManagedProcess:
            log.write_text("")
            return await ManagedProcess.start(name, ["sh", "-c", script], log_path=log)

        async def serves(process: ManagedProcess) -> str:
            while "serving" not in log.read_text():
                if not process.is_running:
                    raise await process.died()
                await asyncio.sleep(0.01)
            return f"http://{name}"

        return KeptServer(start, serves, end)

    return making


async def until_another(servers: KeptServers, name: str, process_id: int) -> int:
    while (new := servers.process_ids()[name]) == process_id:  # noqa: ASYNC110 (nothing tells of a new process)
        await asyncio.sleep(0.01)
    return new


async def test_one_that_dies_is_started_again(make):
    async with asyncio.timeout(DEADLINE_S), keep_servers([make("one"), make("two")]) as servers:
        assert servers.urls == ("http://one", "http://two")
        one, two = servers.process_ids().values()
        os.kill(one, signal.SIGKILL)
        os.kill(await until_another(servers, "one", one), signal.SIGKILL)
        assert servers.process_ids()["two"] == two
    with pytest.raises(ProcessLookupError):
        os.kill(two, 0)


async def test_one_that_dies_too_often_is_given_up_and_all_are_a_failure(make, caplog):
    async with asyncio.timeout(DEADLINE_S), keep_servers([make("one"), make("two")]) as servers:
        failure = asyncio.ensure_future(servers.failure())
        for name in ("one", "two"):
            process_id = servers.process_ids()[name]
            for _ in range(2):
                os.kill(process_id, signal.SIGKILL)
                process_id = await until_another(servers, name, process_id)
            assert not failure.done()
            os.kill(process_id, signal.SIGKILL)
        assert "3 deaths within 60 s of service; the last: the two process was killed by SIGKILL" in str(await failure)
    assert sum("is given up" in record.message for record in caplog.records) == 2


async def test_of_one_that_is_given_up_because_it_does_not_serve_no_process_is_left(tmp_path: Path):
    starts: list[ManagedProcess] = []

    async def start() -> ManagedProcess:
        starts.append(await ManagedProcess.start("one", ["sleep", "100000"], log_path=tmp_path / "one.log"))
        return starts[-1]

    async def serves(process: ManagedProcess) -> str:
        if process is not starts[0]:
            raise EngineUnreachable("it did not serve in time")
        return "http://one"

    async with asyncio.timeout(DEADLINE_S), keep_servers([KeptServer(start, serves, ManagedProcess.aclose)]) as servers:
        os.kill(starts[0].pid, signal.SIGKILL)
        assert "it did not serve in time" in str(await servers.failure())
        assert [process.is_running for process in starts] == [False] * 3


async def test_one_that_does_not_start_is_an_error(make):
    with pytest.raises(ProcessDied, match="the one process exited with 7"):
        async with keep_servers([make("one", "exit 7"), make("two")]):
            pass


async def test_they_are_ended_all_at_once(make):
    both_are_told = asyncio.Barrier(2)

    async def end(process: ManagedProcess) -> None:
        await both_are_told.wait()
        await process.aclose()

    async with asyncio.timeout(DEADLINE_S), keep_servers([make("one", end=end), make("two", end=end)]) as servers:
        processes = servers.process_ids().values()
    for process_id in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


class Clock:
    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def serve(count: DeathCount, clock: Clock, seconds: float, start_s: float = 0.0) -> bool:
    clock.time_s += start_s
    count.begin()
    clock.time_s += seconds
    return count.end()


def test_three_within_a_minute_are_too_many() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 30.0) for _ in range(3)] == [False, False, True]


def test_three_further_apart_are_not() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 31.0) for _ in range(6)] == [False] * 6


def test_slow_starts_do_not_excuse_deaths() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 1.0, start_s=300.0) for _ in range(3)] == [False, False, True]


def test_deaths_in_a_start_count() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 1.0), count.end(), count.end()] == [False, False, True]


@pytest.mark.parametrize(
    ("settings", "sharing"),
    [
        ({}, "1"),
        ({"num_servers": 3}, "3"),
        ({"num_servers": 3, "device": "cpu"}, "3"),
        ({"num_servers": 3, "device": "cuda"}, "1"),  # each has a GPU of its own
    ],
)
def test_who_shares_its_memory(settings: dict[str, Any], sharing: str) -> None:
    command = list(command_of(EngineConfig(**settings), Path("model"), WeightVersion()))
    assert command[command.index("--sharing") + 1] == sharing
