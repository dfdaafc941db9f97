"""Sandboxes that are jails.

1. Nothing is left when the pool is closed; 2. when the host is killed, processes and control groups go too; 3. a jail
that is killed fails its calls, and its files are gone; if its programs took all memory, that is their failure; 4. one
that does not answer is killed; of its zygote's other jails none suffers, and a zygote that is killed or does not answer
is replaced, and nothing of its stock is handed out; 5. cancelling a call kills its program; 6. programs of one sandbox
share files, of two nothing; 7. what the host writes belongs to the programs; 8. a jail that cannot be built is an error
with its reason; 9. the disk is as large as asked; 10. more isolation than there is is refused, also by `auto`, which
takes a jail where there is one; 11. a share of the CPUs slows a program down; 12. no descriptor stays open, neither
when a process may have no more; 13. jails of one zygote do not reach each other, nor use up the processes of each other
where a user without root has no control groups; 14. old names of the backend work, with a warning; 15. the umask of the
host does not matter; 16. a process on its way to be a program holds nothing of the agent's once others can look in;
17. connections that nobody accepts are few, and hold little.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes import Isolation, Limits, Pool, SandboxSpec, Status, jail, open_pool
from sandboxes.agent.forker import children_of
from sandboxes.cgroups import hierarchies_here
from sandboxes.conformance.harm import processes_left
from sandboxes.jail import Zygote
from sandboxes.owner import PREFIX, own_tag
from tests.sandboxes.conftest import PATIENCE_S, pool_of

GONE = "the sandbox is gone"


@pytest_asyncio.fixture(loop_scope="module")
async def backend(pool_at) -> str:
    await pool_at("jail")  # or the test is skipped
    return "jail"


@pytest_asyncio.fixture(loop_scope="module")
async def own_pool(backend: str) -> AsyncIterator[Pool]:
    """For a test that harms it, or looks at its processes."""
    async with pool_of(backend) as pool:
        yield pool


def groups_of(tag: str) -> list[Path]:
    return [group for hierarchy in hierarchies_here() for group in hierarchy.path.glob(f"{PREFIX}{tag}*")]


def descriptors() -> set[str]:
    """What this process has open of control groups, programs and pipes."""
    found: set[str] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def children() -> set[int]:
    return set(children_of(os.getpid()))


async def test_closing_the_pool_leaves_nothing(backend: str) -> None:
    before, groups_before = children(), groups_of(own_tag())
    async with open_pool(backend=backend, wall_s=20.0) as pool, pool.acquire() as box:
        assert (await box.exec_python("print(1)")).is_ok
        assert children() > before
        call = asyncio.create_task(box.exec_python("import time; time.sleep(1000)"))
        assert (await box.exec_python("print(2)")).is_ok
        await pool.close()
        with pytest.raises(SandboxError):
            await call
    assert children() == before
    assert groups_of(own_tag()) == groups_before


async def test_no_descriptor_stays_open(backend: str) -> None:
    before = descriptors()
    async with open_pool(backend=backend, wall_s=20.0) as pool, pool.acquire() as box:
        await asyncio.gather(*(box.exec(["cat"], stdin=stdin) for stdin in (b"", b"in") * 4))
        await box.exec(["sleep", "1000"], limits=Limits(wall_s=0.1))
        assert (await box.exec(["readlink", "/proc/self/fd/0"])).is_ok
    assert descriptors() <= before


async def test_no_jail_where_no_more_files_may_be_open(backend: str, descriptors_left) -> None:
    spec = SandboxSpec().cell(Limits())
    zygote = await Zygote.start()
    before = len(os.listdir("/proc/self/fd"))
    num_handed = 2  # folder and relay
    for num_free in range(num_handed + 2):
        is_enough = num_free > num_handed  # and our end of the control socket
        with (
            descriptors_left(num_free),
            contextlib.nullcontext() if is_enough else pytest.raises(SandboxError, match=r"open files|files open"),
        ):
            await (await zygote.fork(spec)).aclose()
        assert not zygote.is_stuck and not zygote.is_dead
        assert len(os.listdir("/proc/self/fd")) == before
    await zygote.aclose()


HOST = """
import asyncio, sys
from sandboxes import open_pool
from sandboxes.owner import own_tag

async def main():
    async with open_pool(backend=sys.argv[1], wall_s=60.0) as pool, pool.acquire() as box:
        await box.exec_python("")
        print(own_tag(), flush=True)
        await box.exec_python("import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(1000)")

asyncio.run(main())
"""


async def test_killed_host_leaves_nothing(backend: str) -> None:
    pipe = asyncio.subprocess.PIPE
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, backend, stdout=pipe, stderr=pipe)
    tag = (await host.stdout.readline()).decode().strip()
    assert tag
    host.kill()
    await host.communicate()  # the jail and the keeper of the groups have the host's stderr: it ends when they do
    assert groups_of(tag) == []


def is_process(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def is_soon_gone(pid: int) -> bool:
    """Its end was brought about, but nobody waits for it."""
    for _ in range(1000):
        if not is_process(pid):
            return True
        await asyncio.sleep(0.01)
    return False


def relays(zygote: int) -> list[int]:
    """Those of the jails of a zygote, by the process that we started for it."""
    [behind_the_walls] = children_of(zygote)
    return children_of(behind_the_walls)


@pytest.mark.parametrize("is_first_process", [False, True])
async def test_killed_jail_fails_its_calls_and_is_gone_and_no_other(own_pool: Pool, is_first_process: bool) -> None:
    before = children()
    async with own_pool.acquire() as box, own_pool.acquire() as other:
        await box.write("file", b"x")
        [zygote] = children() - before
        [relay] = relays(zygote)
        cat = await box.spawn(["cat"])
        await other.write("file", b"y")
        [first] = children_of(relay)
        os.kill(first if is_first_process else relay, signal.SIGKILL)
        with pytest.raises(SandboxError, match=GONE):
            await box.exec_python("import time; time.sleep(1000)")
        with pytest.raises(SandboxError, match=GONE):
            await cat.write(b"x")
        with pytest.raises(SandboxError, match="and its files with it; acquire another"):
            await box.read("file")
        assert await other.read("file") == b"y"
        assert (await other.exec_python("")).is_ok
    assert await is_soon_gone(first)


@pytest.mark.parametrize("is_behind_the_walls", [False, True])
async def test_killed_zygote_takes_its_jails_along_and_another_takes_its_place(
    own_pool: Pool, is_behind_the_walls: bool
) -> None:
    before = children()
    await own_pool.warm(num_cells=3)
    async with own_pool.acquire() as box:
        await box.exec_python("")
        [zygote] = children() - before
        all_relays = relays(zygote)
        os.kill(children_of(zygote)[0] if is_behind_the_walls else zygote, signal.SIGKILL)
        with pytest.raises(SandboxError, match=GONE):
            await box.exec_python("import time; time.sleep(1000)")
        async with own_pool.acquire() as next_box:  # and none of the dead stock
            assert (await next_box.exec_python("")).is_ok
    assert not any(map(is_process, all_relays))


async def test_jail_that_dies_for_want_of_memory_is_its_programs_failure(own_pool: Pool) -> None:
    if "memory of many processes together" in own_pool.capabilities().cannot_stop:
        pytest.skip("no control groups here")
    before = children()
    small = Limits(wall_s=PATIENCE_S, memory_bytes=2**25)
    async with own_pool.acquire(SandboxSpec(limits=small)) as box:
        await box.exec_python("hoard = b'x' * 2**28")
        [zygote] = children() - before
        call = asyncio.create_task(box.exec_python("import time; time.sleep(1000)"))
        assert (await box.exec(["true"])).is_ok
        [relay] = relays(zygote)
        os.kill(children_of(relay)[0], signal.SIGKILL)
        assert ((await call).status, (await box.exec(["true"])).status) == (Status.MEMORY, Status.MEMORY)
        with pytest.raises(OSError, match="used up all memory"):
            await box.read("file")


@pytest.mark.slow
async def test_jail_that_does_not_answer_is_killed_and_no_other(soon_given_up: None, own_pool: Pool) -> None:
    before = children()
    async with own_pool.acquire() as box, own_pool.acquire() as other:
        await box.exec_python("")
        [zygote] = children() - before
        [relay] = relays(zygote)
        await other.exec_python("")
        os.kill(relay, signal.SIGSTOP)
        with pytest.raises(SandboxError, match="did not start a program within"):
            await box.exec_python("print(1)", limits=Limits(wall_s=0.1))
        await box.close()
        assert await is_soon_gone(relay)
        assert (await other.exec_python("")).is_ok


async def test_zygote_that_does_not_answer_is_replaced(own_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(jail, "STOP_TIMEOUT_S", 0.5)
    before = children()
    async with own_pool.acquire() as box, own_pool.acquire() as late:
        await box.exec_python("")
        [zygote] = children() - before
        [behind_the_walls] = children_of(zygote)
        os.kill(behind_the_walls, signal.SIGSTOP)
        with pytest.raises(SandboxError, match=r"did not start within 0\.5 s"):
            await late.exec_python("")
        assert (await box.exec_python("")).is_ok  # what it has forked lives on
        async with own_pool.acquire() as another:
            assert (await another.exec_python("")).is_ok
    await own_pool.close()
    assert children() <= before


async def test_jails_of_one_zygote_have_working_directories_of_their_own(own_pool: Pool) -> None:
    before = children()
    async with own_pool.acquire(SandboxSpec(workdir="/first/of/all")) as box, own_pool.acquire() as other:
        assert (await box.exec(["sh", "-c", "pwd; mkdir /first/x /x; ls -A /work; ls -A"])).stdout == b"/first/of/all\n"
        assert (await other.exec(["sh", "-c", "pwd; mkdir /work/../x; ls -d /first"])).stdout == b"/work\n"
        assert len(children() - before) == 1


NEIGHBOUR = """
import socket, sys
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0here"); abstract.listen()
local = socket.create_server(("127.0.0.1", 4000))
print("ready", flush=True)
sys.stdin.read()
"""
PROBE = """
import os, socket
for family, address in ((socket.AF_UNIX, "\\0here"), (socket.AF_INET, ("127.0.0.1", 4000))):
    try: socket.socket(family).connect(address)
    except OSError as error: print(error.strerror)
print(sorted(name for name in os.listdir("/proc") if name.isdigit()) == ["1", str(os.getpid())])
try: os.kill(-1, 9)
except OSError as error: print(error.strerror)
"""


async def test_jails_of_one_zygote_do_not_reach_each_other(pool: Pool) -> None:
    async with pool.acquire() as box, pool.acquire() as other:
        neighbour = await box.spawn([sys.executable.replace(sys.prefix, sys.base_prefix), "-c", NEIGHBOUR])
        assert await anext(neighbour.stdout) == b"ready\n"
        result = await other.exec_python(PROBE)
        assert result.stdout.decode().splitlines()[:3] == ["Connection refused", "Connection refused", "True"]
        await neighbour.close_stdin()
        assert (await neighbour.wait()).is_ok


PROCESSES_OF_A_USER = """
import asyncio, os, sys
from areal_agent.errors import SandboxError
from sandboxes import Limits, open_pool

async def main():
    try:
        async with open_pool(backend=sys.argv[1], wall_s=20.0) as pool, pool.acquire() as box, pool.acquire() as other:
            crowd = await box.spawn(["sh", "-c", "for i in $(seq 20); do sleep 1000 & done; echo ready; wait"])
            assert await anext(crowd.stdout) == b"ready\\n"
            for num_processes in (4, 40):
                source = f"import os, time\\nfor _ in range({num_processes}): os.fork() or time.sleep(1000)"
                print((await other.exec_python(source, limits=Limits(pids=16))).exit_code)
    except SandboxError as error:
        print(error)

if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
asyncio.run(main())
"""


async def test_jails_of_a_user_have_processes_of_their_own(backend: str) -> None:
    """The kernel counts them by user where no control group does."""
    pipe = asyncio.subprocess.PIPE
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESSES_OF_A_USER, backend, stdout=pipe)
    said, _ = await host.communicate()
    if b"no jail can be built" in said:  # he may not make namespaces, or not read this Python
        pytest.skip(said.decode())
    assert said == b"0\n1\n"


async def test_cancelling_a_call_kills_its_program(pool: Pool) -> None:
    async with pool.acquire() as box:
        await box.exec(["mkfifo", "gate"])
        call = asyncio.create_task(box.exec_python("open('gate', 'w').write('here'); import time; time.sleep(1000)"))
        assert (await box.exec_python("print(open('gate').read(4))")).stdout == b"here\n"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(PATIENCE_S):  # the agent has sent the signal before it starts what looks
            while await processes_left(box):
                pass


async def test_files_are_shared_within_a_sandbox_alone(pool: Pool) -> None:
    async with pool.acquire(SandboxSpec(files={"a/b": b"mine"})) as one, pool.acquire() as other:
        assert (await one.exec(["cat", "a/b"])).stdout == b"mine"
        for place in ("/work/a/b", "/tmp/x", "/dev/shm/x"):
            await one.exec(["sh", "-c", f"echo x > {place}"])
            assert (await other.exec(["cat", place])).status is Status.NONZERO


NOBODY_ACCEPTS = """
import contextlib, socket
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(4096)
held = []
with contextlib.suppress(TimeoutError):
    while len(held) < 200:
        held.append(socket.create_connection(listener.getsockname(), timeout=1.0))
        held[-1].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True: held[-1].send(bytes(1000))
waiting = [int(line.split()[4].split(":")[1], 16) for line in open("/proc/net/tcp").readlines()[2:]]
print(len(held), max(waiting) < 2**13)
"""


async def test_connections_that_nobody_accepts(pool: Pool) -> None:
    async with pool.acquire(SandboxSpec(limits=Limits(wall_s=PATIENCE_S, open_files=512))) as box:
        assert (await box.exec_python(NOBODY_ACCEPTS)).stdout == b"129 True\n"


LOOKER = """
import contextlib, os, signal, sys
print("ready", flush=True)
os.set_blocking(0, False)
while sys.stdin.buffer.read(1) is None:
    with contextlib.suppress(OSError): os.kill(-1, signal.SIGSTOP)
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {"1", str(os.getpid())}:
        with contextlib.suppress(OSError):
            held = [os.readlink(f"/proc/{pid}/fd/{file}") for file in os.listdir(f"/proc/{pid}/fd")]
            if any(name.startswith("socket") for name in held): print(held, flush=True)
        with contextlib.suppress(OSError): os.kill(int(pid), signal.SIGCONT)
"""


async def test_newcomer_holds_nothing_of_the_agent_when_others_can_look_in(pool: Pool) -> None:
    async with pool.acquire() as box:
        looker = await box.spawn_python(LOOKER)
        assert await anext(looker.stdout) == b"ready\n"
        for _ in range(40):
            assert (await box.exec(["true"])).is_ok
        await looker.write(b"x")
        assert [chunk async for chunk in looker.stdout] == []


async def test_what_the_host_writes_is_the_programs_to_change(pool: Pool) -> None:
    async with pool.acquire() as box:
        await box.write("folder/file", b"old")
        result = await box.exec(
            ["sh", "-c", "echo new > folder/file && mv folder moved && rm moved/file && rmdir moved"]
        )
        assert result.is_ok, result.stderr


async def test_jail_that_cannot_be_built_is_an_error(pool: Pool) -> None:
    async with pool.acquire(SandboxSpec(limits=Limits(inodes=1))) as box:
        with pytest.raises(SandboxError, match="the jail could not be built: No space left on device"):
            await box.exec_python("")


async def test_disk_is_bounded_as_asked(pool: Pool) -> None:
    async with pool.acquire(SandboxSpec(limits=Limits(disk_bytes=2**20, inodes=20))) as box:
        result = await box.exec(["sh", "-c", "df --output=size,itotal . | tail -1"])
        assert result.stdout.split() == [b"1024", b"20"]


async def test_more_isolation_than_there_is_is_refused(backend: str, pool: Pool) -> None:
    with pytest.raises(SandboxError, match="gives only 'namespaces'"):
        async with pool.acquire(SandboxSpec(min_isolation=Isolation.VM)):
            pass
    with pytest.raises(SandboxError, match="min_isolation is 'container'"):
        async with open_pool(backend=backend, min_isolation=Isolation.CONTAINER):
            pass
    with pytest.raises(SandboxError, match="min_isolation is 'vm'"):
        async with open_pool(backend="auto", min_isolation=Isolation.VM):
            pass


async def test_strict_umask_of_the_host(backend: str) -> None:
    before = os.umask(0o077)
    try:
        async with open_pool(backend=backend) as pool, pool.acquire() as box:
            result = await box.exec_python("import statistics; open('/dev/null', 'w').close(); open('x', 'w').close()")
    finally:
        os.umask(before)
    assert (result.status, result.stderr) == (Status.OK, b"")


async def test_auto_takes_a_jail_or_better_and_embedded_a_jail(backend: str) -> None:
    async with open_pool(backend="auto", min_isolation=Isolation.NAMESPACES) as pool:
        assert pool.capabilities().isolation.covers(Isolation.NAMESPACES)
    async with open_pool(backend="embedded") as pool:
        assert pool.capabilities().isolation is Isolation.NAMESPACES
    with pytest.raises(SandboxError, match="min_isolation is 'container', but the strongest backend gives only"):
        async with open_pool(backend="embedded", min_isolation=Isolation.CONTAINER):
            pass


@pytest.mark.parametrize("old_name", ["bubblewrap", "namespaces"])
async def test_old_names_warn(backend: str, old_name: str) -> None:
    with pytest.warns(FutureWarning, match=f"backend '{old_name}' is now called 'jail'") as warned:
        async with open_pool(backend=old_name) as pool:
            assert pool.capabilities().backend == "jail"
    assert warned[0].filename == __file__


async def test_a_share_of_the_cpus(pool: Pool) -> None:
    if "memory of many processes together" in pool.capabilities().cannot_stop:
        pytest.skip("no control groups here")
    source = "import time\nwhile time.process_time() < 0.2: pass"
    async with pool.acquire() as box:
        result = await box.exec_python(source, limits=Limits(wall_s=20.0, cpus=0.2))
    assert result.is_ok
    assert result.wall_s > 2 * result.cpu_s  # five times, less what fits before the first pause
