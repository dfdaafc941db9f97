"""The tasks of a folder for a run (a config's, `AREAL_AGENT_TASKS`, or three tiny ones), as instructions and places."""

import os
import random
from pathlib import Path
from typing import Any, Literal

from sandboxes.tasks.harbor import load_tasks

FOLDERS = Path(__file__).with_name("folders")
NUM_TASKS = {"train": 1_000, "test": 30}


def load(
    split: Literal["train", "test"], seed: int, num: int | None = None, folder: str | None = None
) -> list[dict[str, Any]]:
    """Return `num` tasks, every one as often as any other. They are the same in both splits: there are so few."""
    if split not in NUM_TASKS:
        raise ValueError(f"split is {split!r}; valid: {', '.join(map(repr, NUM_TASKS))}")
    tasks = load_tasks(folder or os.environ.get("AREAL_AGENT_TASKS") or FOLDERS)
    random.Random(f"terminal/{split}/{seed}").shuffle(tasks)
    return [
        {
            "id": f"{split}-{seed}-{number}",
            "messages": [{"role": "user", "content": task.instruction.strip()}],
            "folder": str(task.folder),
        }
        for number, task in ((number, tasks[number % len(tasks)]) for number in range(num or NUM_TASKS[split]))
    ]
