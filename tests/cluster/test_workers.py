"""Rollout workers, as real processes; those on another machine have the main process write their shards (1, 3).

1. rollouts spread over them, and their trajectories are in one ledger; 2. counts are those of all, and survive one;
3. one killed in mid-answer is started again, and so are its rollouts, in new sessions: the old ones are orphans;
4. three deaths in a row end it with an error; 5. a cancelled rollout ends its session; 6. what is open at the end is an
orphan; 7. a workflow that is not there is an error at the start; 8. one that blocks is named here too, and counted;
9. one that blocks for ever costs its worker, not the run; 10. servers that join or leave do so for workers, too, and
for those that are started again.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent import ConfigError, Status, Task
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.fleet.member import FleetView
from areal_agent.errors import ProcessDied
from areal_agent.ledger import questions
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.types import Drop, Fate, PauseMode, SessionPurpose, WeightVersion
from tests.cluster.conftest import crews, serving


def spec_of(number: int, **data: str) -> RolloutSpec:
    return RolloutSpec(
        session_id=f"s-{number}",
        group_id="g000000",
        task=Task(id=str(number), data={"question": f"What is {number}?", **data}),
        seed=number,
        purpose=SessionPurpose.TRAIN,
    )


async def until_sampling(crew, num_requests: int) -> None:
    """Wait until so many requests have reached the engine."""
    await crew.pool.stats()  # not what an earlier test left
    while sum(seat.gateway.num_engine_requests for seat in crew.pool.seats) < num_requests:
        await crew.pool.stats()


async def roll_out(crew, *numbers: int) -> list:
    return [asyncio.create_task(crew.pool.run(spec_of(number))) for number in numbers]


def num_sessions(crew, worker: int) -> int:
    with sqlite3.connect(crew.ledger.shard_path(f"w{worker}")) as connection:
        return connection.execute("SELECT count(*) FROM sessions").fetchone()[0]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["here", "elsewhere"],
)
async def crew(request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Two workers that solve whatever the tests give them; each test has numbers of its own."""
    async with crews(tmp_path_factory.mktemp("crew"), small_model) as make:
        yield await make("solve", is_elsewhere=request.param, workers=2, max_concurrent=4)


with_a_crew = pytest.mark.asyncio(loop_scope="module")


@with_a_crew
async def test_rollouts_spread_over_workers_into_one_ledger(crew) -> None:
    before = [num_sessions(crew, 0), num_sessions(crew, 1)]
    await crew.engine.pause(PauseMode.IN_PLACE)
    running = await roll_out(crew, *range(4))
    await until_sampling(crew, 4)
    assert [seat.load for seat in crew.pool.seats] == [2, 2]
    await crew.engine.resume()
    ended = await asyncio.gather(*running)
    assert [(one.session_id, one.status, one.lost) for one in ended] == [
        (f"s-{number}", Status.COMPLETED, ()) for number in range(4)
    ]
    assert [num_sessions(crew, 0), num_sessions(crew, 1)] == [num + 2 for num in before]
    assert {"s-0", "s-1", "s-2", "s-3"} <= {one.session_id for one in await crew.ledger.ask(questions.waiting)}


@with_a_crew
async def test_a_cancelled_rollout_ends_its_session(crew) -> None:
    await crew.engine.pause(PauseMode.IN_PLACE)
    (running,) = await roll_out(crew, 10)
    await until_sampling(crew, 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await crew.engine.resume()
    assert (await crew.ledger.trajectory("s-10")).status is Status.CANCELLED


@with_a_crew
async def test_a_killed_worker_and_its_rollouts_start_again(crew) -> None:
    turns = (await crew.pool.stats()).gateway.turns
    await asyncio.gather(*await roll_out(crew, *range(20, 24)))
    before = await crew.pool.stats()
    assert before.gateway.turns == turns + 4
    assert 0.0 < before.gateway.engine_busy_s <= before.rolling_s
    await crew.engine.pause(PauseMode.IN_PLACE)
    running = await roll_out(crew, 24, 25)
    await until_sampling(crew, 2)
    victim, bystander = crew.pool.seats
    victim_pid, bystander_pid = victim.pid, bystander.pid
    os.kill(victim_pid, signal.SIGKILL)
    while victim.pid in (victim_pid, None):
        await crew.pool.stats()
    await crew.engine.resume()
    first, second = await asyncio.gather(*running)
    assert (first.session_id, first.status, first.lost) == ("s-24.2", Status.COMPLETED, ("s-24",))
    assert (second.session_id, second.status, second.lost) == ("s-25", Status.COMPLETED, ())
    orphan = await crew.ledger.trajectory("s-24")
    assert (orphan.status, orphan.fate) == (Status.ORPHAN, Fate(dropped=Drop.ORPHAN))
    waiting = {one.session_id for one in await crew.ledger.ask(questions.waiting)}
    assert {"s-24.2", "s-25"} <= waiting and "s-24" not in waiting
    assert bystander.pid == bystander_pid
    num_before = num_sessions(crew, 0)
    await asyncio.gather(*await roll_out(crew, 26, 27))
    assert num_sessions(crew, 0) == num_before + 1  # the one that was started again works
    after = await crew.pool.stats()
    assert after.gateway.turns == before.gateway.turns + 4
    assert before.gateway.engine_busy_s < after.gateway.engine_busy_s <= after.rolling_s


@pytest.mark.slow  # several starts of a process
async def test_one_that_starts_while_its_engine_is_nowhere_finds_it_later(make_crew) -> None:
    crew = await make_crew("solve", workers=1)
    (seat,) = crew.pool.seats
    engines, pid = seat.settings.engine.urls, seat.pid
    seat.tell_engines(FleetView(serving=(), out={"http://127.0.0.1:1": "it has moved"}, versions=()))
    os.kill(pid, signal.SIGKILL)
    while seat.pid in (pid, None):
        await crew.pool.stats()
    seat.tell_engines(FleetView(serving=engines, out={}, versions=()))
    (running,) = await roll_out(crew, 1)
    assert (await running).status is Status.COMPLETED


@pytest.mark.slow  # several starts of a process
async def test_one_elsewhere_that_is_ended_tells_of_no_end_that_is_not_in_the_ledger(make_crew) -> None:
    crew = await make_crew("solve", workers=1, is_elsewhere=True)
    await crew.engine.pause(PauseMode.IN_PLACE)
    (running,) = await roll_out(crew, 0)
    await until_sampling(crew, 1)
    (seat,) = crew.pool.seats
    pid = seat.pid
    os.kill(pid, signal.SIGTERM)
    while seat.pid in (pid, None):
        await crew.pool.stats()
    await crew.engine.resume()
    ended = await running
    assert (ended.status, ended.lost) == (Status.COMPLETED, ("s-0",))


@pytest.mark.slow  # several starts of a process
async def test_three_deaths_in_a_row_end_it(make_crew) -> None:
    crew = await make_crew("die", workers=1)
    running = await roll_out(crew, 0)
    failure = await crew.pool.failure()
    assert isinstance(failure, ProcessDied)
    assert "3 deaths within 60 s of service; the last: the worker 0 process was killed by SIGKILL" in str(failure)
    assert (await running[0]).status is Status.ORPHAN
    with pytest.raises(ProcessDied, match="3 deaths"):
        await crew.pool.run(spec_of(1))


@pytest.mark.slow
async def test_what_is_left_open_at_the_end_is_an_orphan(make_crew) -> None:
    crew = await make_crew("solve", workers=1)
    await crew.engine.pause(PauseMode.IN_PLACE)
    (running,) = await roll_out(crew, 0)
    await until_sampling(crew, 1)
    os.kill(crew.pool.seats[0].pid, signal.SIGKILL)
    await crew.pool.aclose()
    running.cancel()
    await asyncio.wait({running})
    assert (await crew.ledger.trajectory("s-0")).status is Status.ORPHAN


@pytest.mark.slow
async def test_a_workflow_that_is_not_there_is_an_error_at_the_start(make_crew) -> None:
    with pytest.raises(ConfigError, match="module 'agents' has no attribute 'nothing'"):
        await make_crew("nothing", workers=1)


@pytest.mark.slow
async def test_a_workflow_that_blocks_is_named_and_counted(make_crew, caplog: pytest.LogCaptureFixture) -> None:
    crew = await make_crew("block", workers=1)
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*await roll_out(crew, 0))
        async with asyncio.timeout(30):
            while (await crew.pool.stats()).loop_blocked_s == 0.0:  # noqa: ASYNC110 (counted once the loop runs again)
                await asyncio.sleep(0.1)
    warnings = [record.getMessage() for record in caplog.records]
    assert any("worker 0: rollout s-0 has blocked the event loop for" in text for text in warnings), warnings
    assert any("agents.py:" in text and "in block: threading.Event().wait(0.5)" in text for text in warnings), warnings


@pytest.mark.slow  # the limit is 30 s
async def test_a_workflow_that_blocks_for_ever_is_told_and_ended(make_crew, caplog: pytest.LogCaptureFixture) -> None:
    crew = await make_crew("hang_once", workers=1, timeout_s=10.0)
    running = asyncio.create_task(crew.pool.run(spec_of(0, marker=str(crew.logs / "marker"))))
    while "worker 0: rollout s-0 has blocked the event loop" not in caplog.text:
        await asyncio.wait({running}, timeout=0.1)
        assert not running.done()
    ended = await running
    assert (ended.session_id, ended.status, ended.lost) == ("s-0", Status.ERROR, ())
    error = (await crew.ledger.trajectory("s-0")).error
    assert error is not None and "agents.py:35 in hang_once: threading.Event().wait(); use await" in error


@pytest.mark.slow
async def test_workers_hear_of_servers_that_join_and_leave(make_crew, small_model: Path) -> None:
    crew = await make_crew("solve", workers=1)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(small_model))
        joining = await stack.enter_async_context(contextlib.aclosing(HttpEngine(server.base_url)))
        address = EngineAddress(backend="embedded", urls=(crew.engine.base_url,))
        fleet = await stack.enter_async_context(contextlib.aclosing(address.connect()))
        fleet.pushes.begin_with(small_model, WeightVersion())
        telling = asyncio.create_task(crew.pool.tell_of(fleet))
        stack.callback(telling.cancel)

        await fleet.add(server.base_url)
        await fleet.remove(crew.engine.base_url)
        (seat,) = crew.pool.seats
        while seat.settings.engine.urls != (server.base_url,):  # noqa: ASYNC110 (a task of its own tells)
            await asyncio.sleep(0)
        await asyncio.gather(*await roll_out(crew, 0))
        generated_tokens = (await joining.stats()).generated_tokens
        assert generated_tokens
        pid = seat.pid
        os.kill(pid, signal.SIGKILL)
        while seat.pid in (pid, None):
            await crew.pool.stats()
        await asyncio.gather(*await roll_out(crew, 1))
        assert (await joining.stats()).generated_tokens > generated_tokens
        assert (await crew.engine.stats()).generated_tokens == 0
