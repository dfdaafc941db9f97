"""Plays one rollout of a workflow where areal_agent is not installed: `python play.py FILE TASK BASE_URL KEY MODEL`.

It prints the reward. Of a Rollout there is only what a client is made with.
"""

import asyncio
import importlib.util
import inspect
import json
import sys
from dataclasses import dataclass
from types import ModuleType


@dataclass
class Rollout:
    base_url: str
    api_key: str
    model: str

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")


def main(file: str, task: str, *how: str) -> None:
    sys.modules["areal_agent"] = stand_in = ModuleType("areal_agent")
    stand_in.Rollout = Rollout
    spec = importlib.util.spec_from_file_location("workflow", file)
    sys.modules["workflow"] = workflow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workflow)
    reward = workflow.solve(json.loads(task), Rollout(*how))
    print(asyncio.run(reward) if inspect.iscoroutine(reward) else reward)


if __name__ == "__main__":
    main(*sys.argv[1:])
