"""Control groups, found, made, counted and removed.

1. The own group of a process is found in version 1, version 2 and both, also below a mount of a part; 2. version 2 is
written and read as its documentation says (in a plain folder, which takes what it is given); 3. a group with processes
is killed on release, and gone; 4. trees of dead owners are removed, of living ones not.
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
    GROUP_PREFIX,
    ControlGroup,
    GroupTree,
    Hierarchy,
    find_hierarchies,
    hierarchies_here,
    remove_abandoned,
)
from sandboxes.owner import is_abandoned, own_tag


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
    group = ControlGroup([Hierarchy(version=2, controllers=("memory", "pids", "cpu"), path=folder)])
    group.limit(Limits(memory_bytes=1000, pids=7, cpus=0.5))
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
    group = tree.new(Limits())
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    for descriptor in group.descriptors:
        os.write(descriptor, str(process.pid).encode())
    tree.release(group)
    assert await process.wait() == -signal.SIGKILL
    tree.new(Limits())  # tries again to remove what was still dying
    assert group.end()


async def test_trees_of_dead_owners_are_removed(tree: GroupTree) -> None:
    script = "from sandboxes.owner import own_tag; print(own_tag())"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    tag = (await process.communicate())[0].decode().strip()
    assert (is_abandoned(tag), is_abandoned(own_tag()), is_abandoned("no tag")) == (True, False, False)
    home = next(hierarchy for hierarchy in hierarchies_here() if "pids" in hierarchy.controllers).path
    dead, alive = (home / f"{GROUP_PREFIX}{owner}.test" for owner in (tag, own_tag()))
    for folder in (dead, alive):
        (folder / "1").mkdir(parents=True)
    try:
        assert remove_abandoned() >= 1
        assert (dead.exists(), alive.exists()) == (False, True)
    finally:
        (alive / "1").rmdir()
        alive.rmdir()
