"""Plays one rollout of a workflow where areal_agent is not installed: `python play.py FILE TASK BASE_URL KEY MODEL`.

It prints the reward. `from areal_agent import Rollout` gives the class here, which has what a client is made with.
"""

import asyncio
import importlib
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Rollout:
    base_url: str
    api_key: str
    model: str

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")


def main(file: str, task: str, *how: str) -> None:
    sys.modules["areal_agent"] = sys.modules[__name__]
    sys.path.insert(0, str(Path(file).parent))
    reward = importlib.import_module(Path(file).stem).solve(json.loads(task), Rollout(*how))
    print(asyncio.run(reward) if inspect.iscoroutine(reward) else reward)


if __name__ == "__main__":
    main(*sys.argv[1:])
