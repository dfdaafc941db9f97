"""Workflows that workers import by path. What they do is told by the task."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from areal_agent import Rollout


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """One turn."""
    await rollout.client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": task["question"]}]
    )
    return 1.0


async def die(task: dict[str, Any], rollout: Rollout) -> float:
    """Kill the process, as a crash of native code would."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


async def block(task: dict[str, Any], rollout: Rollout) -> float:
    """Hold up the event loop."""
    threading.Event().wait(0.5)
    return await solve(task, rollout)


async def hang_once(task: dict[str, Any], rollout: Rollout) -> float:
    """Hold up the event loop for ever, at the first attempt."""
    if is_first_attempt(Path(task["marker"])):
        threading.Event().wait()
    return await solve(task, rollout)


def is_first_attempt(marker: Path) -> bool:
    """Attempts are in different processes: a file is what they share."""
    is_first = not marker.exists()
    marker.touch()
    return is_first


async def count_digits(task: dict[str, Any], rollout: Rollout) -> float:
    """One turn, with a reward that a random model can earn."""
    reply = await rollout.client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": task["question"]}]
    )
    return sum(letter.isdigit() for letter in reply.choices[0].message.content or "") / 10
