"""Control groups, version 1 and 2: what bounds all processes of one program together, and counts what befell them.

Blocking, if only for the kernel. It knows no sandbox, and not who makes groups when (`group_tree.py`).
"""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sandboxes.limits import Limits

DEFAULT_PIDS = 64
CPU_PERIOD_US = 100_000
CHUNK_BYTES = 65_536
PAGE_BYTES = 4096
MAX_LEFT_BYTES = 1 << 20
"""Of memory, files too, that the next program of a group may find used."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What of a program's limits a group keeps."""

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
        self._counts: dict[str, int] = {}  # of its program, by file, as far as they were asked for
        self._is_killed = False
        self._watched: dict[str, int] = {}  # descriptors of what is read after every program, by file
        self.descriptors: list[int] = []
        self.stays_open = False  # from one program to the next

    def make(self) -> None:
        for folder in self._folders:
            folder.path.mkdir()
        self.limit()

    def limit(self) -> None:
        """Set what the kernel bounds; the folders are there."""
        for folder in self._folders:
            self._limit_in(folder)

    def open(self) -> None:
        """For a program that is about to come."""
        self._counts.clear()
        for entrance in self._entrances[len(self.descriptors) :]:
            self.descriptors.append(os.open(entrance, os.O_WRONLY | os.O_CLOEXEC))

    def close_descriptors(self) -> None:
        """Once the program has them."""
        if not self.stays_open:
            self._close_entrances()

    def close(self) -> None:
        """All descriptors."""
        self._close_entrances()
        while self._watched:
            os.close(self._watched.popitem()[1])

    def kill(self) -> None:
        """All that are in it, and from here on nothing in it can fork."""
        self._is_killed = True
        with contextlib.suppress(FileNotFoundError):  # it is gone, and they with it
            self._write("pids", "pids.max", "0")
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def num_oom_kills(self) -> int:
        return self._count(self._oom_kills, b"oom_kill")

    def was_refused_processes(self) -> bool:
        return self._count(self._refusals, b"max") > 0

    def is_as_new(self) -> bool:
        """Whether the next program would find no trace of those before in it, but for a little of their memory."""
        if self._is_killed or self._counts != {self._oom_kills: 0, self._refusals: 0}:
            return False
        if self.bounds.cpus is not None:  # it may owe CPU time
            return False
        try:
            return not self._watch(self._members_file) and int(self._watch(self._usage)) <= MAX_LEFT_BYTES
        except OSError:  # it was removed by somebody else
            return False

    def end(self) -> bool:
        """Kill what is left in it and remove it. False while something is still dying."""
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
        """The first page; to open a file anew costs the kernel more than to read it."""
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
