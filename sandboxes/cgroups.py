"""What bounds all programs of a sandbox together; and control groups, version 1 and 2, which do so for jails.

`SharedBounds` changes the bounds as programs ask for others. A `GroupTree` is one provider's folder in each hierarchy,
named by its owner, with a `ControlGroup` for every jail. Making and removing a group takes the kernel milliseconds, so
a thread does both. A keeper process waits for the end of the host and then removes the whole tree.

`reap_groups` removes what dead processes left, for the case that their keeper was killed too.
"""

import asyncio
import contextlib
import errno
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.owner import PREFIX, is_abandoned, own_tag
from sandboxes.spec import Limits

DEFAULT_PIDS = 64
DEFAULT_DISK_BYTES = 64 * 2**20
AGENT_BYTES = 32 * 2**20
"""Memory added to that of the programs, for the agent and what the kernel keeps for it."""
NUM_FORKERS = 1
"""The processes of ours in a jail's control group."""
CPU_PERIOD_US = 100_000
CHUNK_BYTES = 65_536
TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"
"""In version 1 the buffers of TCP and UDP sockets have this bound of their own; in version 2 they count as memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The part of a program's limits that holds for all programs of its sandbox together."""

    memory_bytes: int
    pids: int
    cpus: float | None

    @classmethod
    def of(cls, limits: Limits) -> Self:
        return cls(memory_bytes=limits.memory_bytes, pids=limits.pids or DEFAULT_PIDS, cpus=limits.cpus)

    @property
    def quota_us(self) -> int:
        """The CPU time of each `CPU_PERIOD_US`; -1 if it is not bounded."""
        return -1 if self.cpus is None else max(1000, round(self.cpus * CPU_PERIOD_US))


class SharedBounds:
    """The current bounds of one sandbox. `change` makes the kernel or the engine change them.

    As many programs run at once as there may be processes; others wait their turn. A program that asks for other bounds
    waits until those that run have ended. Both waits end, because all these programs have deadlines; a program that the
    host talks with may have none, so it takes no turn, and nobody waits for its end.
    """

    def __init__(self, bounds: Bounds, change: Callable[[Bounds], Awaitable[None]]) -> None:
        self._bounds = bounds
        self._change = change
        self._turn = asyncio.Lock()
        self.slots = asyncio.Semaphore(bounds.pids)  # to hold while a process is needed
        self._num_timed = 0
        self._num_endless = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @asynccontextmanager
    async def held(self, limits: Limits) -> AsyncGenerator[None, None]:
        """Hold the bounds and a slot for one program that runs to its end."""
        await self.hold(limits, is_timed=True)
        try:
            async with self.slots:
                yield
        finally:
            self.release(is_timed=True)

    async def hold(self, limits: Limits, *, is_timed: bool) -> None:
        """Hold the bounds for one program until `release`; ValueError when an endless one runs within other bounds."""
        bounds = Bounds.of(limits)
        async with self._turn:
            if bounds != self._bounds:
                await self._change_to(bounds)
            self._num_timed += is_timed
            self._num_endless += not is_timed
            if is_timed:
                self._is_idle.clear()

    def release(self, *, is_timed: bool) -> None:
        """End the hold of one program."""
        self._num_timed -= is_timed
        self._num_endless -= not is_timed
        if not self._num_timed:
            self._is_idle.set()

    async def _change_to(self, bounds: Bounds) -> None:
        if not self._num_endless:
            await self._is_idle.wait()
        if self._num_endless:
            raise ValueError(
                f"a program asks for {bounds} while one without a deadline runs within {self._bounds}, and programs of "
                "a sandbox share memory, processes and CPUs; give them in SandboxSpec.limits, or run it alone"
            )
        await self._change(bounds)
        self._bounds = bounds
        self.slots = asyncio.Semaphore(bounds.pids)


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


class ControlGroup:
    """The group of one sandbox, with a folder in every hierarchy.

    Programs share it with an agent of one process, and with the files of a disk in memory of `disk_bytes`, for which
    there is room: when memory runs out, some program holds more than its bound, and is killed, never the agent.
    """

    def __init__(self, folders: Sequence[Hierarchy], disk_bytes: int) -> None:
        self._folders = folders
        self._own_bytes = AGENT_BYTES + disk_bytes
        self._by_controller = {name: folder for folder in folders for name in folder.controllers}

    def make(self, bounds: Bounds) -> None:
        for folder in self._folders:
            folder.path.mkdir()
        self.limit(bounds)

    def limit(self, bounds: Bounds) -> None:
        """Set the kernel's bounds in folders that exist."""
        self._limit_memory(bounds.memory_bytes + self._own_bytes)
        with contextlib.suppress(FileNotFoundError):  # version 2
            self._write("memory", (TCP_LIMIT, buffer_bytes(bounds.memory_bytes)))
        self._write("pids", ("pids.max", bounds.pids + NUM_FORKERS))
        if "cpu" in self._by_controller:
            most = "max" if bounds.cpus is None else bounds.quota_us
            self._write("cpu", ("cpu.cfs_quota_us", bounds.quota_us), ("cpu.max", f"{most} {CPU_PERIOD_US}"))

    @contextlib.contextmanager
    def descriptors(self) -> Generator[list[int], None, None]:
        """Open the two files of counters, as an agent's relay reads them, and what a process writes to to join."""
        opened: list[int] = []
        try:
            opened.append(self._open("memory", "memory.oom_control", "memory.events"))
            opened.append(self._open("pids", "pids.events", "pids.events"))
            for folder in self._folders:
                opened.append(os.open(f"{folder.path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            yield opened
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def num_oom_kills(self) -> int:
        words = self._read("memory", "memory.oom_control", "memory.events").split()
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    def end(self) -> bool:
        """Kill what is left in the group and remove it. False while something is still dying."""
        try:
            with contextlib.suppress(FileNotFoundError):  # somebody else removed it
                for pid in self._read("pids", "cgroup.procs", "cgroup.procs").split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            for folder in self._folders:
                with contextlib.suppress(FileNotFoundError):
                    folder.path.rmdir()
        except OSError:
            return False
        return True

    def _limit_memory(self, num_bytes: int) -> None:
        """Bound memory, swap included. In version 1 the first file may not pass the second, so the order depends."""
        parts = [
            (("memory.limit_in_bytes", num_bytes), ("memory.max", num_bytes)),
            (("memory.memsw.limit_in_bytes", num_bytes), ("memory.swap.max", 0)),
        ]
        for order in (parts, parts[::-1]):
            try:
                for pair in order:
                    with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                        self._write("memory", *pair)
                return
            except OSError as error:
                if error.errno != errno.EINVAL or order is not parts:
                    raise

    def _read(self, controller: str, first: str, second: str) -> bytes:
        descriptor = self._open(controller, first, second)
        try:
            return b"".join(iter(lambda: os.read(descriptor, CHUNK_BYTES), b""))
        finally:
            os.close(descriptor)

    def _open(self, controller: str, first: str, second: str) -> int:
        """Open a controller's file, which has the name `first` in version 1 and `second` in version 2."""
        folder = self._by_controller[controller]
        return os.open(f"{folder.path}/{first if folder.version == 1 else second}", os.O_RDONLY | os.O_CLOEXEC)

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
        """Return a new group for one sandbox; SandboxError when none can be made."""
        if self._is_closed:
            raise SandboxError("the sandbox pool is closed; open another")
        making = self._loop.run_in_executor(self._thread, self._make, limits)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._drop_made)
            raise
        except OSError as error:
            raise SandboxError(f"a control group could not be made: {error}") from error

    def drop(self, group: ControlGroup) -> None:
        """Remove a group when its last process is gone."""
        if not self._is_closed:  # after that the keeper removes all
            self._thread.submit(self._remove, group)

    async def aclose(self) -> None:
        assert self._keeper.stdin is not None
        self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown)
        self._keeper.stdin.close()
        await self._keeper.wait()

    def _drop_made(self, making: asyncio.Future[ControlGroup]) -> None:
        """Remove a group whose taker was cancelled."""
        if not making.cancelled() and making.exception() is None:
            self.drop(making.result())

    def _make(self, limits: Limits) -> ControlGroup:
        """Make a group. Runs in the thread."""
        self._num_made += 1
        name = str(self._num_made)
        folders = [replace(folder, path=folder.path / name) for folder in self._folders]
        group = ControlGroup(folders, limits.disk_bytes or DEFAULT_DISK_BYTES)
        try:
            group.make(Bounds.of(limits))
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
