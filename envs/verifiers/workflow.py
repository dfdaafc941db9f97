"""The model plays a row of a verifiers environment, and its rubric gives the reward."""

import asyncio
import importlib
import json
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from areal_agent import Rollout, SandboxError
from envs.verifiers.tasks import open_environment, require_verifiers

FAULTS: ContextVar[list[str]] = ContextVar("faults")
"""What reward functions of this rollout raised: the rubric logs it, and counts 0."""


async def solve(task: dict[str, Any], rollout: Rollout) -> float | None:
    """Return the reward of the rubric; each of its functions is a named part."""
    require_verifiers()
    vf: Any = await asyncio.to_thread(importlib.import_module, "verifiers")  # takes seconds, once
    env = await rollout.shared(opener_of(task["environment"], json.dumps(task["args"], sort_keys=True)))
    faults: list[str] = []
    FAULTS.set(faults)
    output = await env.run_rollout(task["row"], vf.OpenAIChatCompletionsClient(rollout.client), rollout.model, {})
    if output.get("error"):
        faults.insert(0, output["error"]["error_chain_repr"])
    if faults:
        raise SandboxError(f"verifiers could not finish the rollout: {'; '.join(faults)}")
    rollout.log(stop=output.get("stop_condition"))
    for name, value in (output["metrics"] or {}).items():
        rollout.reward(value, name=name)
    return output["reward"]


@cache
def opener_of(name: str, args: str) -> Callable[[Rollout], AbstractAsyncContextManager[Any]]:
    """Return what opens an environment: the same for the same arguments, so that its rollouts share it."""
    return partial(opened, name, args)


@asynccontextmanager
async def opened(name: str, args: str, _rollout: Rollout) -> AsyncGenerator[Any]:
    env = open_environment(name, json.loads(args))
    handler, logger = Faults(), logging.getLogger("verifiers")
    logger.addHandler(handler)
    try:
        yield env
    finally:
        logger.removeHandler(handler)
        await env._teardown()


class Faults(logging.Handler):
    """Collects in `FAULTS` what the package logs as an error while it handles an exception."""

    def emit(self, record: logging.LogRecord) -> None:
        faults = FAULTS.get(None)
        if faults is not None and record.levelno >= logging.ERROR and sys.exception() is not None:
            faults.append(record.getMessage())
