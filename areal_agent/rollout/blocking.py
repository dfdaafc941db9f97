"""Where an event loop is stuck: which line of a stack is the workflow's. Pure; it knows no thread and no clock."""

import linecache
import selectors
import sysconfig
import traceback
from asyncio import base_events
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROLLOUT_TASK = "rollout "
"""How the name of a task begins that runs a workflow; its session's id follows."""

REMEDY = "use await asyncio.sleep, an async client, or await asyncio.to_thread(...)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Not a workflow's: Python's own, installed, or of areal_agent."""
        return self.file.startswith(_LIBRARIES) or "site-packages" in self.file or "dist-packages" in self.file


_IMPORTLIB = "<frozen importlib"

_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    str(Path(__file__).parent.parent),
    "<frozen ",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blockage:
    """What held up an event loop. `task` is the name of the asyncio task that ran, None outside of tasks."""

    place: Frame
    task: str | None
    is_importing: bool = False  # the place made Python import modules: that happens once

    def describe(self, seconds: float) -> str:
        """One line: who, for how long, where, and what to do instead."""
        where = f"{_shown(self.place.file)}:{self.place.line} in {self.place.function}"
        source = linecache.getline(self.place.file, self.place.line).strip()
        where = f"{where}: {source}" if source else where
        if self.place.is_library or self.is_importing:
            return f"the event loop has not answered for {seconds:.1f} s; it is at {where}"
        is_named = self.task is not None and self.task.startswith(ROLLOUT_TASK)
        who = self.task if is_named else f"a workflow (task {self.task})"
        return f"{who} blocks the event loop for {seconds:.1f} s at {where}; {REMEDY}"


def frames_of(innermost: FrameType) -> tuple[Frame, ...]:
    """A stack as plain data, innermost first."""
    return tuple(
        Frame(file=frame.f_code.co_filename, line=line, function=frame.f_code.co_name)
        for frame, line in traceback.walk_stack(innermost)
    )


def find_blockage(frames: Sequence[Frame], task: str | None) -> Blockage | None:
    """What blocks the loop that runs on this stack (innermost first); None when it only waits for events.

    The innermost line of a workflow, else the innermost of all.
    """
    inside = tuple(_inside_the_loop(frames))
    is_waiting = not inside or (len(inside) == 1 and inside[0].file == selectors.__file__)
    if is_waiting:  # the machine was busy elsewhere
        return None
    depth = next((depth for depth, frame in enumerate(inside) if not frame.is_library), 0)
    is_importing = any(frame.file.startswith(_IMPORTLIB) for frame in inside[:depth])
    return Blockage(place=inside[depth], task=task, is_importing=is_importing)


def _inside_the_loop(frames: Iterable[Frame]) -> Iterable[Frame]:
    """The frames that one step of the loop has called. What called the loop is a program that waits for it."""
    for frame in frames:
        if frame.file == base_events.__file__ and frame.function == "_run_once":
            return
        yield frame


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
