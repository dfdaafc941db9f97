"""Control groups, version 1 and 2: they bound all processes of one program together and count what befell them.

A `GroupTree` is one provider's folder in each hierarchy, named by its owner, with a `ControlGroup` for every running
program. Making and removing a group takes the kernel milliseconds, so a thread does both, and a group whose program
left no trace is used again. A keeper process waits for the end of the host and then removes the whole tree.

`reap_groups` removes what dead processes left, for the case that their keeper was killed too.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.owner import PREFIX, is_abandoned, own_tag
from sandboxes.spec import Limits

DEFAULT_PIDS = 64
CPU_PERIOD_US = 100_000
CHUNK_BYTES = 65_536
TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"
"""In version 1 the buffers of TCP and UDP sockets have this bound of their own; in version 2 they count as memory."""
MAX_LEFT_BYTES = 1 << 20
"""Memory, cached files included, that a group's last program may leave in use for the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """A hierarchy in which this process may make groups, for some controllers."""

    version: int
    controllers: tuple[str, ...]
    path: Path


def buffer_bytes(memory_bytes: int) -> int:
    """Return the bytes that buffers of sockets may take in addition to this memory."""
    return memory_bytes // 4


def hierarchies_here() -> list[Hierarchy]:
    return find_hierarchies(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def find_hierarchies(memberships: str, mounts: str) -> list[Hierarchy]:
    """Return this process's group in every mounted hierarchy.

    The arguments are the texts of /proc/self/cgroup and /proc/self/mountinfo.
    """
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
    """Return the path of a group, given that `root` of its hierarchy is mounted at `mount_point`."""
    relative = os.path.relpath(path, root)
    return Path(mount_point) if relative.startswith("..") else Path(mount_point) / relative


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The part of a program's limits that holds for all its processes together."""

    memory_bytes: int
    pids: int
    cpus: float | None

    @classmethod
    def of(cls, limits: Limits) -> Self:
        return cls(memory_bytes=limits.memory_bytes, pids=limits.pids or DEFAULT_PIDS, cpus=limits.cpus)


class ControlGroup:
    """The group of one program at a time, with a folder in every hierarchy."""

    def __init__(self, folders: Sequence[Hierarchy], bounds: Bounds) -> None:
        self.bounds = bounds
        self.descriptors: list[int] = []  # what a process writes to in order to join, once `open` was called
        self._folders = folders
        self._by_controller = {name: folder for folder in folders for name in folder.controllers}
        self._counts: dict[str, int] = {}  # counters of the current program, as far as they were read
        self._is_killed = False

    def make(self) -> None:
        for folder in self._folders:
            folder.path.mkdir()
        self.limit()

    def limit(self) -> None:
        """Set the kernel's bounds in folders that exist."""
        bounds = self.bounds
        self._write("memory", ("memory.limit_in_bytes", bounds.memory_bytes), ("memory.max", bounds.memory_bytes))
        with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
            self._write("memory", ("memory.memsw.limit_in_bytes", bounds.memory_bytes), ("memory.swap.max", 0))
        with contextlib.suppress(FileNotFoundError):  # version 2
            self._write("memory", (TCP_LIMIT, buffer_bytes(bounds.memory_bytes)))
        self._write("pids", ("pids.max", bounds.pids))
        if "cpu" in self._by_controller and bounds.cpus is not None:
            quota_us = max(1000, round(bounds.cpus * CPU_PERIOD_US))
            self._write("cpu", ("cpu.cfs_quota_us", quota_us), ("cpu.max", f"{quota_us} {CPU_PERIOD_US}"))

    def open(self) -> None:
        """Open what the next program needs to join."""
        self._counts.clear()
        for folder in self._folders:
            self.descriptors.append(os.open(f"{folder.path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the descriptors for joining, once the program has them."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def kill(self) -> None:
        """Kill all processes in the group; from now on nothing in it can fork."""
        self._is_killed = True
        with contextlib.suppress(FileNotFoundError):  # the group is gone, and its processes with it
            self._write("pids", ("pids.max", 0))
            for pid in self._members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def num_oom_kills(self) -> int:
        return self._count("memory", "memory.oom_control", "memory.events", b"oom_kill")

    def was_refused_processes(self) -> bool:
        return self._count("pids", "pids.events", "pids.events", b"max") > 0

    def is_as_new(self) -> bool:
        """Return whether the next program would find no trace of earlier ones, except a little of their memory."""
        if self._is_killed or list(self._counts.values()) != [0, 0]:
            return False
        if self.bounds.cpus is not None:  # it may owe CPU time
            return False
        try:
            memory_bytes = int(self._read("memory", "memory.usage_in_bytes", "memory.current"))
            return memory_bytes <= MAX_LEFT_BYTES and not self._members()
        except OSError:  # somebody else removed it
            return False

    def end(self) -> bool:
        """Kill what is left in the group and remove it. False while something is still dying."""
        try:
            with contextlib.suppress(FileNotFoundError):  # somebody else removed it
                if self._members():
                    self.kill()
            for folder in self._folders:
                with contextlib.suppress(FileNotFoundError):
                    folder.path.rmdir()
        except OSError:
            return False
        return True

    def _members(self) -> list[int]:
        return [int(pid) for pid in self._read("pids", "cgroup.procs", "cgroup.procs").split()]

    def _count(self, controller: str, first: str, second: str, name: bytes) -> int:
        words = self._read(controller, first, second).split()
        self._counts[controller] = int(words[words.index(name) + 1]) if name in words else 0
        return self._counts[controller]

    def _read(self, controller: str, first: str, second: str) -> bytes:
        """Read a controller's file, which has the name `first` in version 1 and `second` in version 2."""
        folder = self._by_controller[controller]
        descriptor = os.open(f"{folder.path}/{first if folder.version == 1 else second}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(lambda: os.read(descriptor, CHUNK_BYTES), b""))
        finally:
            os.close(descriptor)

    def _write(self, controller: str, first: tuple[str, object], second: tuple[str, object] | None = None) -> None:
        """Write a controller's file, given its name and value in version 1 and, if they differ there, in version 2."""
        folder = self._by_controller[controller]
        name, value = first if folder.version == 1 else second or first
        descriptor = os.open(f"{folder.path}/{name}", os.O_WRONLY | os.O_CLOEXEC)  # one write, and never a new file
        try:
            os.write(descriptor, str(value).encode())
        finally:
            os.close(descriptor)


NEEDED = ("memory", "pids")
RETRIES_A_GROUP = 3
"""The number of dying groups that are tried again at each removal; trying all would delay the next one."""
MAX_IDLE = 32
"""The most groups that wait for a program."""
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
"""A shell script, since a shell is the smallest process. Its stdin ends when the host ends."""


class GroupTree:
    """The control groups of one provider. Make it with `open`, end it with `aclose`."""

    def __init__(self, folders: Sequence[Hierarchy], keeper: asyncio.subprocess.Process) -> None:
        self._folders = folders
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="control-groups")
        self._num_made = 0
        self._is_closed = False
        self._idle: deque[ControlGroup] = deque()
        self._dying: deque[ControlGroup] = deque()  # used by the thread only

    @classmethod
    async def open(cls) -> Self:
        """Make the folders; SandboxError where this process may not bound memory and processes by groups."""
        hierarchies = hierarchies_here()
        name = f"{PREFIX}{own_tag()}.{os.urandom(4).hex()}"
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

    async def take(self, limits: Limits) -> ControlGroup:
        """Return a group for one program: a new one, or one whose programs left nothing behind."""
        if self._is_closed:
            raise SandboxError("the sandbox pool is closed; open another")
        bounds = Bounds.of(limits)
        try:
            group = self._pop_idle(bounds) or await self._made(bounds)
        except OSError as error:
            raise SandboxError(f"a control group could not be made: {error}") from error
        try:
            group.open()
        except OSError as error:
            self._drop(group)
            raise SandboxError(f"a control group could not be opened: {error}") from error
        return group

    def give_back(self, group: ControlGroup) -> None:
        """Keep a group for the next program, or remove it when its last process is gone."""
        group.close()
        if group.is_as_new():
            self._idle.append(group)
            if len(self._idle) <= MAX_IDLE:
                return
            group = self._idle.popleft()
        self._drop(group)

    @asynccontextmanager
    async def one(self, limits: Limits) -> AsyncGenerator[ControlGroup, None]:
        """Yield a group for one program."""
        group = await self.take(limits)
        try:
            yield group
        finally:
            self.give_back(group)

    async def aclose(self) -> None:
        assert self._keeper.stdin is not None
        self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown)
        self._keeper.stdin.close()
        await self._keeper.wait()

    def _pop_idle(self, bounds: Bounds) -> ControlGroup | None:
        """Return the last used group with these bounds."""
        group = next((group for group in reversed(self._idle) if group.bounds == bounds), None)
        if group is not None:
            self._idle.remove(group)
        return group

    async def _made(self, bounds: Bounds) -> ControlGroup:
        making = self._loop.run_in_executor(self._thread, self._make, bounds)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._drop_made)
            raise

    def _drop_made(self, making: asyncio.Future[ControlGroup]) -> None:
        """Remove a group whose taker was cancelled."""
        if not making.cancelled() and making.exception() is None:
            self._drop(making.result())

    def _drop(self, group: ControlGroup) -> None:
        group.close()
        if not self._is_closed:  # after that the keeper removes all
            self._thread.submit(self._remove, group)

    def _make(self, bounds: Bounds) -> ControlGroup:
        """Make a group. Runs in the thread."""
        self._num_made += 1
        name = str(self._num_made)
        group = ControlGroup([replace(folder, path=folder.path / name) for folder in self._folders], bounds)
        try:
            group.make()
        except OSError:
            self._remove(group)
            raise
        return group

    def _remove(self, group: ControlGroup) -> None:
        """Remove a group, and retry some earlier ones that were still dying. Runs in the thread."""
        self._dying.appendleft(group)
        for _ in range(min(len(self._dying), 1 + RETRIES_A_GROUP)):
            dying = self._dying.popleft()
            if not dying.end():
                self._dying.append(dying)


def _needed_controllers(hierarchies: Sequence[Hierarchy]) -> list[Hierarchy]:
    """Return the hierarchies and controllers to use; FileNotFoundError if a needed controller is missing."""
    homes: dict[str, Hierarchy] = {}
    for name in (*NEEDED, "cpu"):
        home = next((hierarchy for hierarchy in hierarchies if name in hierarchy.controllers), None)
        if home is not None:
            homes[name] = home
        elif name in NEEDED:
            raise FileNotFoundError(f"the controller {name!r} is not mounted")
    return [
        replace(home, controllers=tuple(name for name, other in homes.items() if other == home))
        for home in dict.fromkeys(homes.values())
    ]


def _make_folder(home: Hierarchy, name: str) -> Hierarchy:
    """Make our folder in a hierarchy.

    In version 2 a group that has processes cannot give controllers to its children; the folder then goes beside it.
    """
    *others, last = _places(home)
    for place in others:
        with contextlib.suppress(OSError):
            return _make_folder_in(place, home, name)
    return _make_folder_in(last, home, name)


def _make_folder_in(place: Path, home: Hierarchy, name: str) -> Hierarchy:
    folder = place / name
    try:
        if home.version == 2:
            _enable(place, home.controllers)
        folder.mkdir()
        if home.version == 2:
            _enable(folder, home.controllers)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
    return replace(home, path=folder)


def _places(hierarchy: Hierarchy) -> tuple[Path, ...]:
    """Return the groups in which our folders may lie."""
    return (hierarchy.path, hierarchy.path.parent) if hierarchy.version == 2 else (hierarchy.path,)


def _enable(folder: Path, controllers: Sequence[str]) -> None:
    """Let the children of a group be bounded by these controllers."""
    file = folder / "cgroup.subtree_control"
    missing = set(controllers) - set(file.read_text().split())
    if missing:
        file.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def reap_groups() -> int:
    """Kill and remove the groups of owners that are dead; return the number of trees."""
    try:
        hierarchies = hierarchies_here()
    except FileNotFoundError:
        return 0  # no control groups on this system
    trees = [
        tree
        for path in {ancestor for hierarchy in hierarchies for ancestor in _places(hierarchy)}
        for tree in path.glob(f"{PREFIX}*")
        if is_abandoned(tree.name.removeprefix(PREFIX).rpartition(".")[0])
    ]
    for tree in trees:
        for members in tree.glob("*/cgroup.procs"):
            with contextlib.suppress(FileNotFoundError):  # somebody else removed it
                for pid in members.read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        for folder in (*tree.glob("*/"), tree):
            with contextlib.suppress(OSError):  # what is still dying goes at the next call
                folder.rmdir()
    return len(trees)
