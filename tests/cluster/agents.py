"""Workflows that workers import by path. What they do is told by the task."""

import os
import signal
import threading
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
