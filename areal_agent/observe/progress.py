"""Progress shows a run to a person while it goes: phases, then steps. It knows how, not what happens in them."""

import os
import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol, TextIO

from areal_agent.observe.progress_live import LiveDisplay
from areal_agent.observe.progress_plain import PlainDisplay
from areal_agent.observe.step_view import StepView, TimeLeft

Mode = Literal["auto", "plain", "none"]


class Display(Protocol):
    """A way of showing it."""

    def phase(self, name: str) -> None: ...

    def phase_progress(self, fraction: float, text: str) -> None: ...

    def step(self, view: StepView, left_s: float | None) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """What a run tells of itself. `auto` is live in a terminal and plain lines elsewhere; `none` shows nothing.

    ::

        progress = Progress(total_steps=25)
        progress.phase("evaluating before")
        progress.phase_progress(0.5, "100/200 tasks")
        progress.step(view)                          # ends the phase
        progress.note("checkpoint saved")
        progress.close()                             # gives the terminal back
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        *,
        mode: Mode = "auto",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = _choose(total_steps, sys.stdout if stream is None else stream, mode)
        self._time_left = TimeLeft(total_steps)
        self._now = now

    def phase(self, name: str) -> None:
        """Something other than steps begins; it ends with the next phase or step."""
        self._time_left.start(self._now())
        if self._display is not None:
            self._display.phase(name)

    def phase_progress(self, fraction: float, text: str = "") -> None:
        """How much of the phase is done, 0 to 1, and in words."""
        self._time_left.start(self._now())
        if self._display is not None:
            self._display.phase_progress(fraction, text)

    def step(self, view: StepView) -> None:
        """A train step is done."""
        left_s = self._time_left.step(view.step, self._now())
        if self._display is not None:
            self._display.step(view, left_s)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._display is not None:
            self._display.note(text)

    def close(self) -> None:
        """Give the terminal back. Harmless when closed before."""
        if self._display is not None:
            self._display.close()


def _choose(total_steps: int, stream: TextIO, mode: Mode) -> Display | None:
    if mode == "none":
        return None
    is_live = mode == "auto" and stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return LiveDisplay(total_steps, stream) if is_live else PlainDisplay(total_steps, stream)
