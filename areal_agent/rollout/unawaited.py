"""Finds calls that a workflow made and did not await, from Python's own warning: `coroutine ... was never awaited`."""

import asyncio
import contextlib
import re
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_agent.rollout.watchdog import ROLLOUT_TASK, Frame

ORIGIN_DEPTH = 2
"""The frames that Python keeps of a coroutine's making: openai's clients make theirs one frame below the caller."""

NEVER_AWAITED = "coroutine .* was never awaited"
FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


@contextmanager
def unawaited_calls() -> Generator[dict[str, str]]:
    """Yield a dict that gets the place of such a call, by the name of the rollout's task that made it.

    The warnings go where they went, each place once.
    """
    found: dict[str, str] = {}
    told: set[str] = set()
    depth = sys.get_coroutine_origin_tracking_depth()

    def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        text = str(message)
        if re.match(NEVER_AWAITED, text):
            made = [*FRAME.findall(text), (filename, lineno, "")]
            frames = [Frame(file=file, line=int(line), function=function) for file, line, function in made]
            with contextlib.suppress(RuntimeError, StopIteration):  # in no loop; in no code of a user
                task, place = asyncio.current_task(), next(one for one in frames if not one.is_library)
                if task is not None and task.get_name().startswith(ROLLOUT_TASK):
                    found[task.get_name()] = f"{Path(place.file).name}:{place.line}"
            if text in told:
                return
            told.add(text)
        show(message, category, filename, lineno, *rest)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", NEVER_AWAITED, RuntimeWarning)
        show, warnings.showwarning = warnings.showwarning, note
        sys.set_coroutine_origin_tracking_depth(max(depth, ORIGIN_DEPTH))
        try:
            yield found
        finally:
            sys.set_coroutine_origin_tracking_depth(depth)
