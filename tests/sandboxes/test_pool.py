"""The pool, its agent, and every way to end.

1. Programs at once are bounded and wait in their order; 2. checkouts are not bounded; 3. a slot is free again after a
failure; 4. cancelling a call kills its program; 5. so does closing its sandbox, and the call fails; 6. closing the
pool leaves neither process nor file, also with programs running; 7. closing twice is harmless, and afterwards nothing
runs; 8. a killed agent fails its calls, takes its programs along, and the next program gets a fresh one; 9. so does
one that no longer answers; 10. when the host is killed, programs and files go too; 11. opening warns of what is not
stopped; 12. more isolation than there is, a limit that is not enforced, too many programs, an unknown backend are
refused; 13. `auto` and `embedded` take plain processes only where these are allowed, with a warning that says why, and
the next strongest backend where the strongest does not work.
"""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from sandboxes import Isolation, Limits, Pool, Sandbox, SandboxSpec, Status, open_pool
from sandboxes.base import Provider
from sandboxes.pool import start_strongest
from sandboxes.subprocess import SubprocessProvider

WAIT = "witness.recv(9)\n"


async def forker_pid(box: Sandbox) -> int:
    return int((await box.exec_python("import os; print(os.getppid())")).stdout)


async def test_programs_wait_in_their_order(witness) -> None:
    async with open_pool(backend="subprocess", wall_s=30.0, max_concurrent=1) as pool, pool.acquire() as box:
        calls = [asyncio.create_task(box.exec_python(witness.connect(str(number)) + WAIT)) for number in range(4)]
        for number, call in enumerate(calls):
            arrival = await witness.arrival()
            assert (arrival.name, witness.arrivals.qsize()) == (str(number), 0)
            assert not call.done()
            arrival.release()
            assert (await call).status is Status.OK


async def test_checkouts_are_not_bounded_and_a_failure_frees_its_slot() -> None:
    pool_of_one = open_pool(backend="subprocess", max_concurrent=1)
    async with pool_of_one as pool, pool.acquire() as one, pool.acquire() as other:
        with pytest.raises(ValueError):
            await one.exec([])
        results = [await box.exec_python("print(1)") for box in (one, other)]
    assert [result.status for result in results] == [Status.OK, Status.OK]


async def test_cancelling_a_call_kills_its_program(box: Sandbox, witness) -> None:
    call = asyncio.create_task(box.exec_python(witness.connect() + WAIT))
    arrival = await witness.arrival()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await arrival.death()
    assert (await box.exec_python("print(1)")).status is Status.OK


async def test_closing_a_sandbox_kills_its_program(pool: Pool, witness) -> None:
    async with pool.acquire() as box:
        call = asyncio.create_task(box.exec_python(witness.connect() + WAIT))
        arrival = await witness.arrival()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        await call
    await arrival.death()


async def test_closing_the_pool_leaves_nothing(witness) -> None:
    async with open_pool(backend="subprocess", wall_s=30.0) as pool, pool.acquire() as box:
        folder = Path(
            (await box.exec_python("open('left', 'w'); import os; print(os.getcwd(), end='')")).stdout.decode()
        )
        forker = await forker_pid(box)
        call = asyncio.create_task(box.exec_python(witness.connect() + WAIT))
        arrival = await witness.arrival()
        await pool.close()
        with pytest.raises(SandboxError):
            await call
    await arrival.death()
    assert not folder.parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(forker, 0)


async def test_closed_is_closed() -> None:
    async with open_pool(backend="subprocess") as pool, pool.acquire() as box:
        await pool.close()
        await pool.close()
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.exec_python("print(1)")
        with pytest.raises(SandboxError, match="the sandbox pool is closed"):
            async with pool.acquire():
                pass


async def test_killed_agent_is_replaced(box: Sandbox, witness) -> None:
    forker = await forker_pid(box)
    call = asyncio.create_task(box.exec_python(witness.connect() + WAIT))
    arrival = await witness.arrival()
    os.kill(forker, signal.SIGKILL)
    with pytest.raises(SandboxError, match="it ended by itself"):
        await call
    await arrival.death()
    assert await forker_pid(box) != forker


@pytest.mark.slow
async def test_agent_that_does_not_answer_is_replaced(soon_given_up: None) -> None:
    async with open_pool(backend="subprocess", wall_s=30.0) as pool, pool.acquire() as box:
        forker = await forker_pid(box)
        os.kill(forker, signal.SIGSTOP)
        with pytest.raises(SandboxError, match="did not start a program within"):
            await box.exec_python("print(1)", limits=Limits(wall_s=0.1))
        assert await forker_pid(box) != forker


HOST = """
import asyncio, sys
from sandboxes import open_pool

async def main():
    async with open_pool(backend="subprocess", wall_s=60.0) as pool, pool.acquire() as box:
        lock = "import os; os.makedirs('a/left'); os.chmod('a', 0); print(os.getcwd())"
        folder = (await box.exec_python(lock)).stdout
        print(folder.decode(), flush=True)
        await box.exec_python(sys.argv[1])

asyncio.run(main())
"""


async def test_killed_host_leaves_nothing(witness) -> None:
    program = witness.connect() + "import os\nif os.fork() == 0: os.setsid()\n" + WAIT
    pipe = asyncio.subprocess.PIPE
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, program, stdout=pipe, stderr=pipe)
    folder = Path((await host.stdout.readline()).decode().strip())
    arrival = await witness.arrival()
    assert (folder / "a").exists()
    host.kill()
    await arrival.death()
    await host.communicate()  # the forker has the host's stderr: it ends when the forker's last act is done
    assert not folder.parent.exists()


async def test_opening_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sandboxes"):
        async with open_pool(backend="subprocess") as pool:
            capabilities = pool.capabilities()
    assert (capabilities.backend, capabilities.isolation) == ("subprocess", Isolation.PROCESS)
    [message] = [record.getMessage() for record in caplog.records]
    assert "does not isolate" in message
    assert all(act in message for act in capabilities.cannot_stop)
    assert {"reading your files", "using the network"} <= set(capabilities.cannot_stop)


async def test_more_isolation_than_there_is_fails_closed(pool: Pool) -> None:
    with pytest.raises(SandboxError, match="'container', but the subprocess backend gives only 'process'"):
        async with pool.acquire(SandboxSpec(min_isolation=Isolation.CONTAINER)):
            pass
    async with pool.acquire(SandboxSpec(min_isolation=Isolation.PROCESS)) as box:
        assert (await box.exec_python("")).status is Status.OK


@pytest.mark.parametrize("name", ["cpus", "pids", "disk_bytes", "inodes"])
async def test_limit_that_is_not_enforced_is_refused(pool: Pool, box: Sandbox, name: str) -> None:
    limits = Limits(**{name: 1})
    with pytest.raises(SandboxError, match=f"Limits.{name} is 1, and the subprocess backend cannot enforce it"):
        await box.exec_python("", limits=limits)
    with pytest.raises(SandboxError, match="leave it out"):
        async with pool.acquire(SandboxSpec(limits=limits)):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "podman"}, "sandbox backend 'podman' does not exist"),
        ({"backend": "subprocess", "max_concurrent": 0}, "max_concurrent is 0"),
        ({"backend": "subprocess", "max_concurrent": 10**9}, "lower it, or raise the limit"),
        ({"backend": "subprocess", "wall_s": -1.0}, "Limits.wall_s is -1.0"),
        ({"backend": "subprocess", "memory_bytes": 0}, "Limits.memory_bytes is 0"),
    ],
)
async def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async with open_pool(**options):
            pass


async def broken() -> Provider:
    raise SandboxError("no daemon answers")


async def working() -> Provider:
    return await SubprocessProvider.start()


@pytest.mark.parametrize("backend", ["auto", "embedded"])
async def test_plain_processes_are_never_taken_unasked(backend: str) -> None:
    with pytest.raises(SandboxError, match=rf"no daemon answers.*the {backend} backend .*sandbox\.min_isolation=none"):
        await start_strongest(backend, [(Isolation.CONTAINER, broken)], None)


async def test_where_they_are_allowed_a_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        provider = await start_strongest("auto", [(Isolation.CONTAINER, broken)], Isolation.NONE)
    try:
        assert provider.capabilities().isolation is Isolation.PROCESS
        assert "subprocess, for no daemon answers" in caplog.text
    finally:
        await provider.close()


async def test_the_next_strongest_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    isolating = [(Isolation.CONTAINER, broken), (Isolation.NAMESPACES, working)]
    with caplog.at_level(logging.WARNING):
        provider = await start_strongest("auto", isolating, None)
    await provider.close()
    assert "subprocess, for" not in caplog.text
