"""Control groups, found, made, counted and removed.

1. The own group of a process is found in version 1, version 2 and both, also below a mount of a part; 2. version 2 is
written and read as its documentation says (in a plain folder, which takes what it is given); 3. a group with processes
is killed when it is given back, and gone; 4. a group in which nothing befell is used again for the same bounds: not one
that was killed, not counted, or still holds memory; idle ones are bounded; 5. trees of dead owners are removed, of
living ones not; 6. a tree that is closed is gone, makes no group, and takes back those that are still out.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from sandboxes import Limits
from sandboxes.cgroups import (
    MAX_IDLE,
    MAX_LEFT_BYTES,
    Bounds,
    ControlGroup,
    GroupTree,
    Hierarchy,
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
    group = ControlGroup(
        [Hierarchy(version=2, controllers=("memory", "pids", "cpu"), path=folder)],
        Bounds.of(Limits(memory_bytes=1000, pids=7, cpus=0.5)),
    )
    group.limit()
    written = {file: (folder / file).read_text() for file in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert written == {"memory.max": "1000", "memory.swap.max": "0", "pids.max": "7", "cpu.max": "50000 100000"}
    assert (group.num_oom_kills(), group.was_refused_processes()) == (2, True)


@pytest.fixture
async def tree():
    try:
        tree = await GroupTree.open()
    except SandboxError as error:
        pytest.skip(str(error))
    yield tree
    await tree.aclose()


async def test_released_group_is_killed_and_gone(tree: GroupTree) -> None:
    group = await tree.take(Limits())
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    enter(group, process.pid)
    tree.give_back(group)
    assert await process.wait() == -signal.SIGKILL
    assert await tree.take(Limits()) is not group
    assert await asyncio.to_thread(group.end)


def enter(group: ControlGroup, pid: int) -> None:
    for descriptor in group.descriptors:
        os.write(descriptor, str(pid).encode())


async def run_in(group: ControlGroup, *argv: str) -> None:
    """A program that joins the group as programs do, and is counted as they are."""
    joining = "".join(f"echo 0 >&{descriptor}; " for descriptor in group.descriptors)
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f'{joining} exec "$@"', "bash", *argv, pass_fds=group.descriptors
    )
    assert await process.wait() == 0
    assert (group.num_oom_kills(), group.was_refused_processes()) == (0, False)


async def test_group_in_which_nothing_befell_is_used_again(tree: GroupTree) -> None:
    group = await tree.take(Limits())
    await run_in(group, "true")
    tree.give_back(group)
    assert await tree.take(Limits(memory_bytes=2**26)) is not group  # another bound
    assert await tree.take(Limits()) is group


async def test_group_is_not_used_again_without_its_counts_when_killed_or_with_memory(tree: GroupTree) -> None:
    uncounted, killed, full = groups = [await tree.take(Limits()) for _ in range(3)]
    await run_in(killed, "true")
    killed.kill()
    file = Path("/dev/shm") / f"left-{os.getpid()}"
    try:
        await run_in(full, "dd", "if=/dev/zero", f"of={file}", f"bs={2 * MAX_LEFT_BYTES}", "count=1", "status=none")
        for group in (uncounted, killed, full):
            tree.give_back(group)
        assert not set(groups) & {await tree.take(Limits()) for _ in groups}
    finally:
        file.unlink(missing_ok=True)


async def test_idle_groups_are_bounded_and_the_oldest_go(tree: GroupTree) -> None:
    groups = [await tree.take(Limits()) for _ in range(MAX_IDLE + 1)]
    for group in groups:
        await run_in(group, "true")
        tree.give_back(group)
    again = {await tree.take(Limits()) for _ in range(MAX_IDLE)}
    assert again == set(groups[1:])


async def test_trees_of_dead_owners_are_removed(tree: GroupTree) -> None:
    script = "from sandboxes.owner import own_tag; print(own_tag())"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    tag = (await process.communicate())[0].decode().strip()
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
    tree.give_back(out)
    assert await asyncio.to_thread(out.end)  # there is nothing to end
