"""Plays one rollout of a workflow where areal_agent is not installed: `python play.py FILE TASK BASE_URL KEY MODEL`.

It prints the reward. `from areal_agent import Rollout` gives the class here, which has what a client is made with.
A file in AReaL's form (`WeatherAgent.run`) goes through areal_agent's adapter, whose imports its environment has.
"""

import asyncio
import importlib
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    workflow = importlib.import_module(Path(file).stem)
    solve = getattr(workflow, "solve", None) or in_areals_form(workflow.WeatherAgent)
    reward = solve(json.loads(task), Rollout(*how))
    print(asyncio.run(reward) if inspect.iscoroutine(reward) else reward)


def in_areals_form(agent: type) -> Any:
    del sys.modules["areal_agent"]
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from httpx_aiohttp import HttpxAiohttpClient

    from areal_agent.rollout.workflow import load_workflow

    async def solve(task: dict[str, Any], rollout: Any) -> object:
        async with HttpxAiohttpClient(trust_env=False, timeout=None) as rollout.http_client:
            return await load_workflow(agent)(task, rollout)

    return solve


if __name__ == "__main__":
    main(*sys.argv[1:])
