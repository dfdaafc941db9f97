"""The control groups of one provider: a folder in each hierarchy, named by its owner, with one for every program.

A group costs the kernel milliseconds to make and remove: a thread does both, and a group in which nothing befell is
used again. A keeper process, which does nothing but wait for the end of its host, removes them all. It knows no
sandbox.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.cgroups import Bounds, ControlGroup, Hierarchy, hierarchies_here
from sandboxes.limits import Limits
from sandboxes.owner import GROUP_PREFIX, is_abandoned, own_tag

NEEDED = ("memory", "pids")
RETRIES_A_GROUP = 3
"""How many of those that were still dying are tried again when one is removed: all would hold up the next."""
MAX_IDLE = 32
"""Groups that wait for a program."""
MAX_OPEN = 8
"""Groups that stay open from one program to the next: each has some seven descriptors."""
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


class GroupTree:
    """Make it with `open`, end it with `aclose`."""

    def __init__(self, folders: Sequence[Hierarchy], keeper: asyncio.subprocess.Process) -> None:
        self._folders = folders
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="control-groups")
        self._num_made = 0
        self._is_closed = False
        self._open: set[ControlGroup] = set()  # those that stay so
        self._idle: deque[ControlGroup] = deque()
        self._dying: deque[ControlGroup] = deque()  # of the thread

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

    async def take(self, limits: Limits) -> ControlGroup:
        """A group for one program, in which there was no other or one that left nothing behind."""
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
        """To the next program, or to be removed when its last process is gone."""
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
        """The last that was used, of those that are open if there are any."""
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
        """Whoever asked for it was cancelled."""
        if not making.cancelled() and making.exception() is None:
            self._drop(making.result())

    def _drop(self, group: ControlGroup) -> None:
        self._open.discard(group)
        group.close()
        if not self._is_closed:  # else the keeper removes all
            self._thread.submit(self._remove, group)

    def _make(self, bounds: Bounds) -> ControlGroup:
        """In the thread."""
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
        """In the thread: this one, and some that were still dying when they were tried before."""
        self._dying.appendleft(group)
        for _ in range(min(len(self._dying), 1 + RETRIES_A_GROUP)):
            dying = self._dying.popleft()
            if not dying.end():
                self._dying.append(dying)


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
