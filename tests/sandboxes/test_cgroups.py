"""Control groups, found, made, counted and removed; and bounds that programs share.

1. The own group of a process is found in version 1, version 2 and both, also below a mount of a part; 2. version 2 is
written and read as its documentation says (in a plain folder, which takes what it is given); 3. a group with processes
is killed when it is dropped, and gone; 4. its bounds can be raised and lowered;
5. trees of dead owners are removed, of living ones not; 6. a tree that is closed is gone, makes no group, and takes
back those that are still out; 7. who asks for other bounds waits for those who run, is served in turn, and is refused
while somebody runs without a deadline.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes import Limits
from sandboxes.cgroups import (
    AGENT_BYTES,
    Bounds,
    ControlGroup,
    GroupTree,
    Hierarchy,
    SharedBounds,
    find_hierarchies,
    hierarchies_here,
    reap_groups,
)
from sandboxes.owner import PREFIX, is_abandoned, own_tag


def test_version_1_is_found() -> None:
    memberships = "4:memory:/jobs/7\n3:cpu,cpuacct:/\n1:name=systemd:/x\n"
    mounts = (
        "30 25 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
        "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 25 0:28 / / rw - ext4 /dev/root rw\n"
    )
    assert find_hierarchies(memberships, mounts) == [
        Hierarchy(version=1, controllers=("memory",), path=Path("/sys/fs/cgroup/memory/jobs/7")),
        Hierarchy(version=1, controllers=("cpu", "cpuacct"), path=Path("/sys/fs/cgroup/cpu,cpuacct")),
    ]


def test_version_2_is_found_with_its_controllers(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "cgroup.controllers").write_text("cpu memory pids\n")
    mounts = f"30 25 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert find_hierarchies("0::/user\n", mounts) == [
        Hierarchy(version=2, controllers=("cpu", "memory", "pids"), path=tmp_path / "user")
    ]


def test_mount_of_a_part_is_its_own_root() -> None:
    mounts = "30 25 0:26 /docker/1f /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n"
    [inside] = find_hierarchies("3:pids:/docker/1f/jobs\n", mounts)
    assert inside.path == Path("/sys/fs/cgroup/pids/jobs")
    [elsewhere] = find_hierarchies("3:pids:/\n", mounts)
    assert elsewhere.path == Path("/sys/fs/cgroup/pids")


def test_version_2_is_written_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    for file in ("memory.max", "memory.swap.max", "pids.max", "cpu.max", "cgroup.procs"):
        (folder / file).write_text("")
    (folder / "memory.events").write_text("low 0\nmax 9\noom 3\noom_kill 2\n")
    (folder / "pids.events").write_text("max 4\n")
    group = ControlGroup([Hierarchy(version=2, controllers=("memory", "pids", "cpu"), path=folder)], disk_bytes=500)
    group.limit(Bounds.of(Limits(memory_bytes=1000, pids=7, cpus=0.5)))
    written = {file: (folder / file).read_text() for file in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    expected = {"memory.swap.max": "0", "pids.max": "10", "cpu.max": "50000 100000"}
    assert written == {"memory.max": str(1500 + AGENT_BYTES), **expected}
    assert group.num_oom_kills() == 2


@pytest_asyncio.fixture(loop_scope="module")
async def tree():
    try:
        tree = await GroupTree.open()
    except SandboxError as error:
        pytest.skip(str(error))
    yield tree
    await tree.aclose()


def enter(group: ControlGroup, pid: int) -> None:
    with group.descriptors() as (_, _, *joining):
        for descriptor in joining:
            os.write(descriptor, str(pid).encode())


async def test_dropped_group_is_killed_and_gone(tree: GroupTree) -> None:
    group = await tree.take(Limits())
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    enter(group, process.pid)
    tree.drop(group)
    assert await process.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(group.end)


async def test_bounds_are_raised_and_lowered(tree: GroupTree) -> None:
    group = await tree.take(Limits(memory_bytes=2**26))
    for memory_bytes in (2**28, 2**26):
        group.limit(Bounds.of(Limits(memory_bytes=memory_bytes)))
    hoard = "hoard = input() and b'x' * 2**28"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", hoard, stdin=asyncio.subprocess.PIPE)
    enter(group, process.pid)
    await process.communicate(b"now\n")
    assert (process.returncode, group.num_oom_kills()) == (-signal.SIGKILL, 1)


async def test_trees_of_dead_owners_are_removed(tree: GroupTree) -> None:
    tag = own_tag().replace(f"{os.getpid()}.", f"{2**22 + 1}.", 1)  # of a process that cannot be
    assert (is_abandoned(tag), is_abandoned(own_tag()), is_abandoned("no tag")) == (True, False, False)
    home = next(hierarchy for hierarchy in hierarchies_here() if "pids" in hierarchy.controllers).path
    dead, alive = (home / f"{PREFIX}{owner}.test" for owner in (tag, own_tag()))
    for folder in (dead, alive):
        (folder / "1").mkdir(parents=True)
    try:
        assert reap_groups() >= 1
        assert (dead.exists(), alive.exists()) == (False, True)
    finally:
        (alive / "1").rmdir()
        alive.rmdir()


async def test_closed_tree_is_gone_and_makes_no_group(tree: GroupTree) -> None:
    out = await tree.take(Limits())
    await tree.aclose()
    with pytest.raises(SandboxError, match="closed"):
        await tree.take(Limits())
    tree.drop(out)
    assert await asyncio.to_thread(out.end)  # there is nothing to end


ONE, OTHER = Limits(pids=1), Limits(pids=2)


async def test_who_asks_for_other_bounds_waits() -> None:
    changes: list[int] = []

    async def change(bounds: Bounds) -> None:
        changes.append(bounds.pids)

    bounds = SharedBounds(Bounds.of(ONE), change)
    await bounds.hold(ONE, is_timed=True)
    others = [asyncio.create_task(bounds.hold(limits, is_timed=True)) for limits in (OTHER, ONE)]
    await asyncio.sleep(0)
    assert changes == []
    bounds.release(is_timed=True)
    await others[0]
    assert (changes, others[1].done()) == ([2], False)
    bounds.release(is_timed=True)
    await others[1]
    assert changes == [2, 1]
    bounds.release(is_timed=True)
    await bounds.hold(ONE, is_timed=False)
    with pytest.raises(ValueError, match="without a deadline"):
        await bounds.hold(OTHER, is_timed=True)


async def test_change_whose_caller_is_cancelled_is_known() -> None:
    changes: list[int] = []
    gate = asyncio.Event()

    async def change(bounds: Bounds) -> None:
        await gate.wait()
        changes.append(bounds.pids)

    bounds = SharedBounds(Bounds.of(ONE), change)
    call = asyncio.create_task(bounds.hold(OTHER, is_timed=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    next_call = asyncio.create_task(bounds.hold(ONE, is_timed=True))
    await asyncio.sleep(0)
    gate.set()
    await next_call
    assert changes == [2, 1]
