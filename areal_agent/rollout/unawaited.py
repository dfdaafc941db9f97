"""Finds calls that a workflow made and did not await, from Python's own warning: `coroutine ... was never awaited`."""

import asyncio
import contextlib
import re
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from areal_agent.rollout.watchdog import ROLLOUT_TASK, Frame

ORIGIN_DEPTH = 2
"""The frames that Python keeps of a coroutine's making: openai's clients make theirs one frame below the caller."""

NEVER_AWAITED = "coroutine .* was never awaited"
FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')


@contextmanager
def unawaited_calls() -> Generator[dict[str, str]]:
    """Yield a dict that gets the place of such a call, by the name of the rollout's task that made it.

    The warnings go where they went, each place once.
    """
    found: dict[str, str] = {}
    told: set[str] = set()
    depth = sys.get_coroutine_origin_tracking_depth()

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if re.match(NEVER_AWAITED, str(message)):
            made = [Frame(file=file, line=int(line), function=of) for file, line, of in FRAME.findall(str(message))]
            made.append(Frame(file=filename, line=lineno, function=""))
            place = next((f"{Path(one.file).name}:{one.line}" for one in made if not one.is_library), "")
            with contextlib.suppress(RuntimeError):  # a thread without a loop
                task = asyncio.current_task()
                if place and task is not None and task.get_name().startswith(ROLLOUT_TASK):
                    found[task.get_name()] = place
            if str(message) in told:
                return
            told.add(str(message))
        show(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", NEVER_AWAITED, RuntimeWarning)
        show, warnings.showwarning = warnings.showwarning, note
        sys.set_coroutine_origin_tracking_depth(max(depth, ORIGIN_DEPTH))
        try:
            yield found
        finally:
            sys.set_coroutine_origin_tracking_depth(depth)
