"""Control groups, version 1 and 2: what bounds all processes of one program together, and counts what befell them.

A provider owns a `GroupTree`: one folder in each hierarchy, named by its owner, with a folder for every running
program. A keeper process, which does nothing but wait for the end of its host, removes them all. It knows no sandbox.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.limits import Limits
from sandboxes.owner import GROUP_PREFIX, is_abandoned, own_tag

DEFAULT_PIDS = 64
CPU_PERIOD_US = 100_000
NEEDED = ("memory", "pids")
RETRIES_A_GROUP = 3
"""How many of the groups that were still dying are tried again when one is made: all would block the loop."""
KEEPER = """
read -r _
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    for group in "$@"; do
        for list in "$group"/*/cgroup.procs; do
            while read -r pid; do kill -9 "$pid"; done < "$list"
        done
        rmdir "$group"/*/ "$group"
    done 2> /dev/null
    left=; for group in "$@"; do [ -d "$group" ] && left=1; done
    [ -z "$left" ] && exit 0
    sleep 0.2
done
"""
"""In shell, the smallest process there is: waits for the end of its input, which is the end of the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """Where this process may make groups for some controllers."""

    version: int
    controllers: tuple[str, ...]
    path: Path


def hierarchies_here() -> list[Hierarchy]:
    return find_hierarchies(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def find_hierarchies(memberships: str, mounts: str) -> list[Hierarchy]:
    """From /proc/self/cgroup and /proc/self/mountinfo: this process's own group in every hierarchy that is mounted."""
    own_path = {names: path for _, names, path in (line.split(":", 2) for line in memberships.splitlines())}
    found: list[Hierarchy] = []
    for line in mounts.splitlines():
        place, _, system = line.partition(" - ")
        root, mount_point = place.split()[3:5]
        kind, _, options = system.split()[:3]
        if kind == "cgroup2" and "" in own_path:
            path = _below(mount_point, root, own_path[""])
            names = (path / "cgroup.controllers").read_text().split() if path.is_dir() else []
            found.append(Hierarchy(version=2, controllers=tuple(names), path=path))
        elif kind == "cgroup":
            for names, path in own_path.items():
                if names and set(names.split(",")) <= set(options.split(",")):
                    found.append(
                        Hierarchy(version=1, controllers=tuple(names.split(",")), path=_below(mount_point, root, path))
                    )
    return found


def _below(mount_point: str, root: str, path: str) -> Path:
    """Where a group is seen when `root` of its hierarchy is mounted at `mount_point`."""
    relative = os.path.relpath(path, root)
    return Path(mount_point) if relative.startswith("..") else Path(mount_point) / relative


class GroupTree:
    """Make it with `open`, end it with `aclose`."""

    def __init__(self, folders: Sequence[Hierarchy], keeper: asyncio.subprocess.Process) -> None:
        self._folders = folders
        self._keeper = keeper
        self._num_made = 0
        self._leftover: deque[ControlGroup] = deque()

    @classmethod
    async def open(cls) -> Self:
        """SandboxError, with the reason, where this process may not make groups that bound memory and processes."""
        hierarchies = hierarchies_here()
        name = f"{GROUP_PREFIX}{own_tag()}.{os.urandom(4).hex()}"
        folders: list[Hierarchy] = []
        try:
            for controllers in _needed_controllers(hierarchies):
                folders.append(_make_folder(controllers, name))
            keeper = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", KEEPER, "sh", *(str(folder.path) for folder in folders),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin"},
                cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            for folder in folders:
                folder.path.rmdir()
            raise SandboxError(
                f"no control groups: {error}; run as root, or in a group that was delegated to this user"
            ) from error
        return cls(folders, keeper)

    @property
    def versions(self) -> str:
        return " and ".join(str(version) for version in sorted({folder.version for folder in self._folders}))

    def new(self, limits: Limits) -> "ControlGroup":
        """A group for one program."""
        for _ in range(min(len(self._leftover), RETRIES_A_GROUP)):
            self.release(self._leftover.popleft())
        self._num_made += 1
        group = ControlGroup(
            [
                Hierarchy(
                    version=folder.version, controllers=folder.controllers, path=folder.path / str(self._num_made)
                )
                for folder in self._folders
            ]
        )
        try:
            group.make(limits)
        except OSError as error:
            self.release(group)
            raise SandboxError(f"a control group could not be made: {error}") from error
        return group

    def release(self, group: "ControlGroup") -> None:
        """Remove a group, now or when its last process is gone."""
        if not group.end():
            self._leftover.append(group)

    async def aclose(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        await self._keeper.wait()


class ControlGroup:
    """The group of one program, with a folder in every hierarchy."""

    def __init__(self, folders: Sequence[Hierarchy]) -> None:
        self._folders = folders
        self._by_controller = {name: folder for folder in folders for name in folder.controllers}
        self.descriptors: list[int] = []

    def make(self, limits: Limits) -> None:
        for folder in self._folders:
            folder.path.mkdir()
        self.limit(limits)
        for folder in self._folders:
            self.descriptors.append(os.open(folder.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))

    def limit(self, limits: Limits) -> None:
        """Set what the kernel bounds; the folders are there."""
        for folder in self._folders:
            self._limit_in(folder, limits)

    def close_descriptors(self) -> None:
        """Once the program has them."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def kill(self) -> None:
        """All that are in it, and from here on nothing in it can fork."""
        with contextlib.suppress(FileNotFoundError):  # it is gone, and they with it
            self._write("pids", "pids.max", "0")
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def num_oom_kills(self) -> int:
        is_first = self._by_controller["memory"].version == 1
        return self._count("memory", "memory.oom_control" if is_first else "memory.events", "oom_kill")

    def was_refused_processes(self) -> bool:
        return self._count("pids", "pids.events", "max") > 0

    def end(self) -> bool:
        """Kill what is left in it and remove it. False while something is still dying."""
        self.close_descriptors()
        try:
            if self._members():
                self.kill()
            for folder in self._folders:
                with contextlib.suppress(FileNotFoundError):
                    folder.path.rmdir()
        except OSError:
            return False
        return True

    def _members(self) -> list[int]:
        try:
            return [int(pid) for pid in (self._by_controller["pids"].path / "cgroup.procs").read_text().split()]
        except FileNotFoundError:  # removed already
            return []

    def _limit_in(self, folder: Hierarchy, limits: Limits) -> None:
        is_first = folder.version == 1
        if "memory" in folder.controllers:
            self._write("memory", "memory.limit_in_bytes" if is_first else "memory.max", str(limits.memory_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                if is_first:
                    self._write("memory", "memory.memsw.limit_in_bytes", str(limits.memory_bytes))
                else:
                    self._write("memory", "memory.swap.max", "0")
        if "pids" in folder.controllers:
            self._write("pids", "pids.max", str(limits.pids or DEFAULT_PIDS))
        if "cpu" in folder.controllers and limits.cpus is not None:
            quota_us = max(1000, round(limits.cpus * CPU_PERIOD_US))
            if is_first:
                self._write("cpu", "cpu.cfs_quota_us", str(quota_us))
            else:
                self._write("cpu", "cpu.max", f"{quota_us} {CPU_PERIOD_US}")

    def _write(self, controller: str, file: str, text: str) -> None:
        descriptor = os.open(self._by_controller[controller].path / file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def _count(self, controller: str, file: str, name: str) -> int:
        text = (self._by_controller[controller].path / file).read_text()
        counts = dict(line.split(maxsplit=1) for line in text.splitlines())
        return int(counts.get(name, 0))


def remove_abandoned() -> int:
    """Kill and remove the groups of dead owners, when their keeper died too; how many trees there were."""
    hierarchies = hierarchies_here()
    trees = [
        tree
        for path in {ancestor for hierarchy in hierarchies for ancestor in _with_parent(hierarchy)}
        for tree in path.glob(f"{GROUP_PREFIX}*")
        if is_abandoned(tree.name.removeprefix(GROUP_PREFIX).rpartition(".")[0])
    ]
    for tree in trees:
        for members in tree.glob("*/cgroup.procs"):
            for pid in members.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for folder in (*tree.glob("*/"), tree):
            with contextlib.suppress(OSError):  # what is still dying goes at the next call
                folder.rmdir()
    return len(trees)


def _with_parent(hierarchy: Hierarchy) -> tuple[Path, ...]:
    return (hierarchy.path, hierarchy.path.parent) if hierarchy.version == 2 else (hierarchy.path,)


def _needed_controllers(hierarchies: Sequence[Hierarchy]) -> list[Hierarchy]:
    """The hierarchies to use, each with the controllers to use there; FileNotFoundError when one is nowhere."""
    chosen: dict[Path, Hierarchy] = {}
    for name in (*NEEDED, "cpu"):
        home = next((hierarchy for hierarchy in hierarchies if name in hierarchy.controllers), None)
        if home is None:
            if name in NEEDED:
                raise FileNotFoundError(f"the controller {name!r} is not mounted")
            continue
        before = chosen[home.path].controllers if home.path in chosen else ()
        chosen[home.path] = Hierarchy(version=home.version, controllers=(*before, name), path=home.path)
    return list(chosen.values())


def _make_folder(home: Hierarchy, name: str) -> Hierarchy:
    """Our folder in a hierarchy. In version 2 a group with processes gives its children no controllers: then beside."""
    places = (home.path,) if home.version == 1 else _with_parent(home)
    refusal: OSError | None = None
    for place in places:
        folder = place / name
        try:
            if home.version == 2:
                _enable(place, home.controllers)
            folder.mkdir()
            if home.version == 2:
                _enable(folder, home.controllers)
        except OSError as error:
            refusal = error
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        return Hierarchy(version=home.version, controllers=home.controllers, path=folder)
    assert refusal is not None
    raise refusal


def _enable(folder: Path, controllers: Sequence[str]) -> None:
    """Let the children of a group be bounded by controllers."""
    file = folder / "cgroup.subtree_control"
    missing = set(controllers) - set(file.read_text().split())
    if missing:
        file.write_text(" ".join(f"+{name}" for name in sorted(missing)))
