"""Progress as plain lines, one a step: for files, pipes and dumb terminals. No colours, no cursor movements."""

from collections.abc import Mapping
from typing import TextIO

from areal_agent.observe.step_view import StepView, biggest_wait, clock_time

HEADER = "   step    reward  success    staleness  sampled/s  trained/s  engine waits     trainer waits      left"


class PlainDisplay:
    """Writes to `stream` and flushes every line."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._phase = ""
        self._quarters_told = 0  # of the phase
        self._has_header = False

    def phase(self, name: str) -> None:
        self._phase, self._quarters_told, self._has_header = name, 0, False
        self._write(f"{name} ...")

    def phase_progress(self, fraction: float, text: str) -> None:
        """One line for each quarter that is done."""
        quarters = int(fraction * 4)
        if quarters > self._quarters_told:
            self._quarters_told = quarters
            self._write(f"{self._phase} ... {quarters * 25:3}%  {text}".rstrip())

    def step(self, view: StepView, left_s: float | None) -> None:
        if not self._has_header:
            self._has_header = True
            self._write(HEADER)
        self._write(
            f"{f'{view.step}/{self._total_steps}':>7} {view.reward:9.3f} {view.success:8.3f} "
            f"{f'{view.staleness_mean:.1f} max {view.staleness_max}':>12} "
            f"{view.generated_tokens_per_s:10,.0f} {view.trained_tokens_per_s:10,.0f}  "
            f"{_wait(view.engine):<16} {_wait(view.trainer):<16} {'-' if left_s is None else clock_time(left_s):>6}"
        )

    def note(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def _wait(shares: Mapping[str, float]) -> str:
    wait = biggest_wait(shares)
    return "-" if wait is None else f"{wait[1]:4.0%} {wait[0]}"
