"""Control groups, version 1 and 2: they bound all processes of one program together and count what befell them.

A `GroupTree` is one provider's folder in each hierarchy, named by its owner, with a `ControlGroup` for every running
program. Making and removing a group takes the kernel milliseconds, so a thread does both, and a group whose program
left no trace is used again. A keeper process waits for the end of the host and then removes the whole tree.

`reap` removes what dead processes left, for the case that their keeper or launcher was killed too: control groups with
their processes, and working folders.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.folder import remove_tree
from sandboxes.owner import FOLDER_PREFIX, GROUP_PREFIX, is_abandoned, own_tag
from sandboxes.spec import Limits

DEFAULT_PIDS = 64
CPU_PERIOD_US = 100_000
CHUNK_BYTES = 65_536
PAGE_BYTES = 4096
MAX_LEFT_BYTES = 1 << 20
"""Memory, cached files included, that a group's last program may leave in use for the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """A hierarchy in which this process may make groups, for some controllers."""

    version: int
    controllers: tuple[str, ...]
    path: Path


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
        self._folders = folders
        self._by_controller = {name: folder for folder in folders for name in folder.controllers}
        self._is_first = self._by_controller["memory"].version == 1
        self._usage = self._file("memory", "memory.usage_in_bytes" if self._is_first else "memory.current")
        self._oom_kills = self._file("memory", "memory.oom_control" if self._is_first else "memory.events")
        self._refusals = self._file("pids", "pids.events")
        self._members_file = self._file("pids", "cgroup.procs")
        self._entrances = [f"{folder.path}/cgroup.procs" for folder in folders]
        self._counts: dict[str, int] = {}  # counters of the current program, by file, as far as they were read
        self._is_killed = False
        self._watched: dict[str, int] = {}  # descriptors of the files that are read after every program
        self.descriptors: list[int] = []
        self.stays_open = False  # whether descriptors are kept open from one program to the next

    def make(self) -> None:
        for folder in self._folders:
            folder.path.mkdir()
        self.limit()

    def limit(self) -> None:
        """Set the kernel's bounds in folders that exist."""
        for folder in self._folders:
            self._limit_in(folder)

    def open(self) -> None:
        """Open what the next program needs to join."""
        self._counts.clear()
        for entrance in self._entrances[len(self.descriptors) :]:
            self.descriptors.append(os.open(entrance, os.O_WRONLY | os.O_CLOEXEC))

    def close_descriptors(self) -> None:
        """Close the descriptors for joining, once the program has them."""
        if not self.stays_open:
            self._close_entrances()

    def close(self) -> None:
        """Close all descriptors."""
        self._close_entrances()
        while self._watched:
            os.close(self._watched.popitem()[1])

    def kill(self) -> None:
        """Kill all processes in the group; from now on nothing in it can fork."""
        self._is_killed = True
        with contextlib.suppress(FileNotFoundError):  # the group is gone, and its processes with it
            self._write("pids", "pids.max", "0")
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def num_oom_kills(self) -> int:
        return self._count(self._oom_kills, b"oom_kill")

    def was_refused_processes(self) -> bool:
        return self._count(self._refusals, b"max") > 0

    def is_as_new(self) -> bool:
        """Return whether the next program would find no trace of earlier ones, except a little of their memory."""
        if self._is_killed or self._counts != {self._oom_kills: 0, self._refusals: 0}:
            return False
        if self.bounds.cpus is not None:  # it may owe CPU time
            return False
        try:
            return not self._watch(self._members_file) and int(self._watch(self._usage)) <= MAX_LEFT_BYTES
        except OSError:  # somebody else removed it
            return False

    def end(self) -> bool:
        """Kill what is left in the group and remove it. False while something is still dying."""
        self.close()
        try:
            if self._members():
                self.kill()
            for folder in self._folders:
                with contextlib.suppress(FileNotFoundError):
                    folder.path.rmdir()
        except OSError:
            return False
        return True

    def _close_entrances(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _members(self) -> list[int]:
        try:
            return [int(pid) for pid in _read(self._members_file).split()]
        except FileNotFoundError:  # removed already
            return []

    def _limit_in(self, folder: Hierarchy) -> None:
        is_first, bounds = folder.version == 1, self.bounds
        if "memory" in folder.controllers:
            self._write("memory", "memory.limit_in_bytes" if is_first else "memory.max", str(bounds.memory_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                if is_first:
                    self._write("memory", "memory.memsw.limit_in_bytes", str(bounds.memory_bytes))
                else:
                    self._write("memory", "memory.swap.max", "0")
        if "pids" in folder.controllers:
            self._write("pids", "pids.max", str(bounds.pids))
        if "cpu" in folder.controllers and bounds.cpus is not None:
            quota_us = max(1000, round(bounds.cpus * CPU_PERIOD_US))
            if is_first:
                self._write("cpu", "cpu.cfs_quota_us", str(quota_us))
            else:
                self._write("cpu", "cpu.max", f"{quota_us} {CPU_PERIOD_US}")

    def _count(self, path: str, name: bytes) -> int:
        words = self._watch(path).split()
        self._counts[path] = int(words[words.index(name) + 1]) if name in words else 0
        return self._counts[path]

    def _watch(self, path: str) -> bytes:
        """Return the first page of a file that is kept open: opening costs the kernel more than reading."""
        if path not in self._watched:
            self._watched[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._watched[path], PAGE_BYTES, 0)

    def _file(self, controller: str, name: str) -> str:
        return f"{self._by_controller[controller].path}/{name}"

    def _write(self, controller: str, file: str, text: str) -> None:
        descriptor = os.open(self._file(controller, file), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(descriptor, CHUNK_BYTES), b""))
    finally:
        os.close(descriptor)


NEEDED = ("memory", "pids")
RETRIES_A_GROUP = 3
"""The number of dying groups that are tried again at each removal; trying all would delay the next one."""
MAX_IDLE = 32
"""The most groups that wait for a program."""
MAX_OPEN = 8
"""The most groups that stay open from one program to the next: each has some seven descriptors."""
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
        self._open: set[ControlGroup] = set()  # groups that stay open
        self._idle: deque[ControlGroup] = deque()
        self._dying: deque[ControlGroup] = deque()  # used by the thread only

    @classmethod
    async def open(cls) -> Self:
        """Make the folders; SandboxError where this process may not bound memory and processes by groups."""
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
        if len(self._open) < MAX_OPEN:
            self._open.add(group)
        group.stays_open = group in self._open
        return group

    def give_back(self, group: ControlGroup) -> None:
        """Keep a group for the next program, or remove it when its last process is gone."""
        if group.is_as_new():
            if not group.stays_open:
                group.close()
            self._idle.append(group)
            if len(self._idle) <= MAX_IDLE:
                return
            group = self._idle.popleft()
        self._drop(group)

    async def aclose(self) -> None:
        assert self._keeper.stdin is not None
        self._is_closed = True
        for group in self._idle:
            group.close()
        await asyncio.to_thread(self._thread.shutdown)
        self._keeper.stdin.close()
        await self._keeper.wait()

    def _pop_idle(self, bounds: Bounds) -> ControlGroup | None:
        """Return the last used group with these bounds, one that is open if possible."""
        fitting = [group for group in reversed(self._idle) if group.bounds == bounds]
        if not fitting:
            return None
        group = next((one for one in fitting if one.stays_open), fitting[0])
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
        self._open.discard(group)
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
    """Make our folder in a hierarchy.

    In version 2 a group that has processes cannot give controllers to its children; the folder then goes beside it.
    """
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


def _with_parent(hierarchy: Hierarchy) -> tuple[Path, ...]:
    return (hierarchy.path, hierarchy.path.parent) if hierarchy.version == 2 else (hierarchy.path,)


def _enable(folder: Path, controllers: Sequence[str]) -> None:
    """Let the children of a group be bounded by these controllers."""
    file = folder / "cgroup.subtree_control"
    missing = set(controllers) - set(file.read_text().split())
    if missing:
        file.write_text(" ".join(f"+{name}" for name in sorted(missing)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reaped:
    """The number of things that `reap` removed."""

    num_groups: int
    num_folders: int


def reap() -> Reaped:
    """Remove all groups and folders of dead processes. What a living process owns is left alone."""
    return Reaped(num_groups=reap_groups(), num_folders=reap_folders())


def reap_groups() -> int:
    """Kill and remove the groups of owners that are dead; return the number of trees."""
    try:
        hierarchies = hierarchies_here()
    except FileNotFoundError:
        return 0  # no control groups on this system
    trees = [
        tree
        for path in {ancestor for hierarchy in hierarchies for ancestor in _with_parent(hierarchy)}
        for tree in path.glob(f"{GROUP_PREFIX}*")
        if is_abandoned(tree.name.removeprefix(GROUP_PREFIX).rpartition(".")[0])
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


def reap_folders() -> int:
    """Remove the working folders of dead processes."""
    abandoned = [
        folder
        for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")
        if is_abandoned(folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0])
    ]
    for folder in abandoned:
        with contextlib.suppress(PermissionError):  # it belongs to another user
            remove_tree(folder)
    return sum(not folder.exists() for folder in abandoned)
