"""The counters of the container's control group, version 1 or 2: processes killed for memory, and refused forks."""

import os

OOM_KILLS = (("/sys/fs/cgroup/memory.events", b"oom_kill"), ("/sys/fs/cgroup/memory/memory.oom_control", b"oom_kill"))
REFUSED_FORKS = (("/sys/fs/cgroup/pids.events", b"max"), ("/sys/fs/cgroup/pids/pids.events", b"max"))


class Counter:
    """A counter in the first of these files that exists; always 0 where none does."""

    def __init__(self, places: tuple[tuple[str, bytes], ...]) -> None:
        self._file: int | None = None
        self._name = b""
        for path, name in places:
            if self._file is None and os.path.exists(path):
                self._file, self._name = os.open(path, os.O_RDONLY | os.O_CLOEXEC), name

    def read(self) -> int:
        if self._file is None:
            return 0
        words = os.pread(self._file, 4096, 0).split()
        return int(words[words.index(self._name) + 1])


class Counters:
    """The counters of killed processes and of refused forks."""

    def __init__(self) -> None:
        self._counters = [Counter(OOM_KILLS), Counter(REFUSED_FORKS)]

    def read(self) -> list[int]:
        return [counter.read() for counter in self._counters]
