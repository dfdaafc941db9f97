"""What bounds all programs of a sandbox together; and control groups, version 1 and 2, which do so for jails.

`SharedBounds` changes the bounds as programs ask for others. A `GroupTree` is one provider's folder in each hierarchy,
named by its owner, with a `ControlGroup` for every jail. What takes the kernel milliseconds is done by one thread, in
order. A keeper process waits for the end of the host and then removes the whole tree.

`reap_groups` removes what dead processes left, for the case that their keeper was killed too.
"""

import asyncio
import contextlib
import os
import signal
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
DEFAULT_DISK_BYTES, DEFAULT_INODES = 64 * 2**20, 10_000
AGENT_BYTES = 48 * 2**20
"""Memory added to that of the programs, for the agent and what the kernel keeps for it."""
NUM_OURS = 3
"""The processes of ours in a jail's control group."""
CPU_PERIOD_US = 100_000
NEEDED = ("memory", "pids")
TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"
"""In version 1 the buffers of TCP and UDP sockets have this bound of their own; in version 2 they count as memory."""
NOT_EVERYWHERE = (TCP_LIMIT, "memory.memsw.limit_in_bytes", "memory.swap.max")
"""The files that kernels lack which do not count these."""


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


def disk_of(limits: Limits) -> tuple[int, int]:
    """Return the bytes and the inodes of a sandbox's disk in memory."""
    return limits.disk_bytes or DEFAULT_DISK_BYTES, limits.inodes or DEFAULT_INODES


class SharedBounds:
    """The current bounds of one sandbox. `change` makes the kernel or the engine change them.

    As many programs run at once as there may be processes; others wait their turn. A program that asks for other bounds
    waits until those that run have ended. Both waits end, because all these programs have deadlines; a program that the
    host talks with may have none, so it takes no turn, and nobody waits for its end.
    """

    def __init__(self, bounds: Bounds, change: Callable[[Bounds], Awaitable[None]]) -> None:
        self._bounds: Bounds | None = bounds  # not known while they change, nor if that fails
        self._change = change
        self._changing: asyncio.Task[None] | None = None  # goes on if its caller is cancelled
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
            if self._changing is not None:
                await asyncio.wait([self._changing])
            if bounds != self._bounds:
                await self._wait_for_idleness(bounds)
                self._changing = asyncio.create_task(self._change_to(bounds))
                await asyncio.shield(self._changing)
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

    async def _wait_for_idleness(self, bounds: Bounds) -> None:
        if not self._num_endless:
            await self._is_idle.wait()
        if self._num_endless:
            raise ValueError(
                f"a program asks for {bounds} while one without a deadline runs within {self._bounds}, and programs of "
                "a sandbox share memory, processes and CPUs; give them in SandboxSpec.limits, or run it alone"
            )

    async def _change_to(self, bounds: Bounds) -> None:
        self._bounds = None
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
    own_paths = [line.split(":", 2)[1:] for line in memberships.splitlines()]
    found: list[Hierarchy] = []
    for line in mounts.splitlines():
        place, _, system = line.partition(" - ")
        root, mount_point = place.split()[3:5]
        kind, _, options = system.split()[:3]
        for names, own_path in own_paths:
            controllers = names.split(",") if names else []
            if kind == ("cgroup" if names else "cgroup2") and set(controllers) <= set(options.split(",")):
                below = os.path.relpath(own_path, root)  # `root` of the hierarchy is what is mounted there
                path = Path(mount_point) / ("." if below.startswith("..") else below)
                if not names and path.is_dir():
                    controllers = (path / "cgroup.controllers").read_text().split()
                found.append(Hierarchy(version=1 if names else 2, controllers=tuple(controllers), path=path))
    return found


class ControlGroup:
    """The group of one sandbox, with a folder in every hierarchy.

    Programs share it with an agent of one process, and with the files of a disk in memory of `disk_bytes`, for which
    there is room: when memory runs out, some program holds more than its bound, and is killed, never the agent.
    """

    def __init__(self, folders: Sequence[Hierarchy], disk_bytes: int) -> None:
        self._folders = folders
        self._own_bytes = AGENT_BYTES + disk_bytes

    def make(self, bounds: Bounds) -> None:
        for folder in self._folders:
            folder.path.mkdir()
        self.limit(bounds)

    def limit(self, bounds: Bounds) -> None:
        """Set the kernel's bounds in folders that exist. Memory includes swap, where the kernel counts that."""
        memory_bytes, pids = bounds.memory_bytes + self._own_bytes, bounds.pids + NUM_OURS
        files = {
            1: [
                ("memory.memsw.limit_in_bytes", -1),  # the next may not pass it
                ("memory.limit_in_bytes", memory_bytes),
                ("memory.memsw.limit_in_bytes", memory_bytes),
                (TCP_LIMIT, buffer_bytes(bounds.memory_bytes)),
                ("pids.max", pids),
                ("cpu.cfs_quota_us", bounds.quota_us),
            ],
            2: [
                ("memory.max", memory_bytes),
                ("memory.swap.max", 0),
                ("pids.max", pids),
                ("cpu.max", f"{'max' if bounds.cpus is None else bounds.quota_us} {CPU_PERIOD_US}"),
            ],
        }
        for folder in self._folders:
            for name, value in files[folder.version]:
                with contextlib.suppress(*(FileNotFoundError,) * (name in NOT_EVERYWHERE)):
                    if name.partition(".")[0] in folder.controllers:
                        _write(folder.path / name, str(value))

    @contextlib.contextmanager
    def descriptors(self) -> Generator[list[int], None, None]:
        """Open the two files of counters, as an agent's relay reads them, and what a process writes to to join."""
        opened: list[int] = []
        try:
            for path in (self._counters_of_memory, self._file("pids", "pids.events", "pids.events")):
                opened.append(os.open(path, os.O_RDONLY))
            for folder in self._folders:
                opened.append(os.open(folder.path / "cgroup.procs", os.O_WRONLY))
            yield opened
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def num_oom_kills(self) -> int:
        words = self._counters_of_memory.read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0

    def end(self) -> bool:
        """Kill what is left in the group and remove it. False while something is still dying."""
        return all([_end_folder(folder.path) for folder in self._folders])

    @property
    def _counters_of_memory(self) -> Path:
        return self._file("memory", "memory.oom_control", "memory.events")

    def _file(self, controller: str, first: str, second: str) -> Path:
        """Return the path of a controller's file, which has the name `first` in version 1 and `second` in version 2."""
        folder = next(folder for folder in self._folders if controller in folder.controllers)
        return folder.path / (first if folder.version == 1 else second)


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)  # one write, and never a new file
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _end_folder(folder: Path) -> bool:
    try:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        folder.rmdir()
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # somebody else removed it
    return True


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
        self._dying: list[ControlGroup] = []  # used by the thread only

    @classmethod
    async def open(cls) -> Self:
        """Make the folders; SandboxError where this process may not bound memory and processes by groups."""
        name = f"{PREFIX}{own_tag()}.{os.urandom(4).hex()}"
        folders: list[Hierarchy] = []
        try:
            for home in _homes(hierarchies_here()):
                folders.append(_make_folder(home, name))
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
        self._num_made += 1
        folders = [replace(folder, path=folder.path / str(self._num_made)) for folder in self._folders]
        group = ControlGroup(folders, disk_of(limits)[0])
        try:
            await self._do(group.make, Bounds.of(limits))
        except BaseException:
            self.drop(group)
            raise
        return group

    async def limit(self, group: ControlGroup, bounds: Bounds) -> None:
        """Change the bounds of a group; SandboxError when the kernel refuses."""
        await self._do(group.limit, bounds)

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

    async def _do(self, act: Callable[[Bounds], None], bounds: Bounds) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox pool is closed; open another")
        try:
            await self._loop.run_in_executor(self._thread, act, bounds)
        except OSError as error:
            raise SandboxError(f"a control group could not be bounded: {error}") from error

    def _remove(self, group: ControlGroup) -> None:
        """Remove a group, and earlier ones that were still dying. Runs in the thread."""
        self._dying = [dying for dying in (*self._dying, group) if not dying.end()]


def _homes(hierarchies: Sequence[Hierarchy]) -> list[Hierarchy]:
    """Return the hierarchies and controllers to use; FileNotFoundError if a needed controller is missing."""
    names_in: dict[Hierarchy, tuple[str, ...]] = {}
    for name in (*NEEDED, "cpu"):
        home = next((hierarchy for hierarchy in hierarchies if name in hierarchy.controllers), None)
        if home is not None:
            names_in[home] = (*names_in.get(home, ()), name)
        elif name in NEEDED:
            raise FileNotFoundError(f"the controller {name!r} is not mounted")
    return [replace(home, controllers=names) for home, names in names_in.items()]


def _make_folder(home: Hierarchy, name: str) -> Hierarchy:
    """Make our folder in a hierarchy, at the first place that takes it."""
    failure = OSError()
    for place in _places(home):
        folder = place / name
        try:
            _enable(place, home)
            folder.mkdir()
            _enable(folder, home)
            return replace(home, path=folder)
        except OSError as error:
            failure = error
            with contextlib.suppress(OSError):
                folder.rmdir()
    raise failure


def _places(hierarchy: Hierarchy) -> tuple[Path, ...]:
    """Return the groups in which our folder may lie.

    In version 2 a group that has processes cannot give controllers to its children; the folder then goes beside it.
    """
    return (hierarchy.path, hierarchy.path.parent)[: hierarchy.version]


def _enable(folder: Path, home: Hierarchy) -> None:
    """Let the children of a group be bounded by these controllers, which version 1 always does."""
    if home.version == 2:
        file = folder / "cgroup.subtree_control"
        if missing := set(home.controllers) - set(file.read_text().split()):
            file.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def reap_groups() -> int:
    """Kill and remove the groups of owners that are dead; return the number of trees."""
    try:
        hierarchies = hierarchies_here()
    except FileNotFoundError:
        return 0  # no control groups on this system
    trees = [
        tree
        for path in {place for hierarchy in hierarchies for place in _places(hierarchy)}
        for tree in path.glob(f"{PREFIX}*")
        if is_abandoned(tree.name.removeprefix(PREFIX).rpartition(".")[0])
    ]
    for tree in trees:
        for folder in (*tree.glob("*/"), tree):
            _end_folder(folder)  # what is still dying goes at the next call
    return len(trees)
