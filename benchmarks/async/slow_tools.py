"""The quickstart's conversation with slow tools: a random wait before each program."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.calculator.reward import score
from envs.calculator.workflow import MAX_TURNS, TOOLS, open_sandboxes, run_tool

Latency = Callable[[random.Random], float]
"""Draws one wait, in seconds."""

MEDIAN_S, SIGMA = 0.5, 1.2


def no_latency(_: random.Random) -> float:
    return 0.0


def long_tailed(generator: random.Random) -> float:
    """Draw from a lognormal, median 0.5 s, sigma 1.2: mean 1.0 s, 95th percentile 3.6 s, largest of 64 about 9 s."""
    return MEDIAN_S * generator.lognormvariate(0.0, SIGMA)


def workflow_with(latency: Latency) -> Callable[[dict[str, Any], Rollout], Coroutine[Any, Any, float]]:
    """Return a workflow whose waits depend only on the rollout's seed: the n-th draws the same in every mode."""

    async def solve(task: dict[str, Any], rollout: Rollout) -> float:
        generator = random.Random(rollout.seed)
        pool = await rollout.shared(open_sandboxes)
        sandbox = await rollout.enter(pool.acquire())
        messages: list[ChatCompletionMessageParam] = list(task["messages"])
        outputs: list[str] = []
        for _ in range(MAX_TURNS):
            reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            if not message.tool_calls:
                return score(message.content or "", outputs, task["answer"])
            messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what came may be sent
            for call in message.tool_calls:
                await asyncio.sleep(latency(generator))
                outputs.append(await run_tool(sandbox, call))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": outputs[-1]})
        return 0.0

    return solve
