"""An agent of OpenAI's Agents SDK with a tool (`pip install openai-agents`). It knows nothing of training."""

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded

from areal_agent import Rollout

from .tasks import score, stock_of

MAX_TURNS = 3


@function_tool(strict_mode=False)  # with it, the gateway takes a malformed call for text, and the model hears nothing
def stock(item: str) -> str:
    """How many there are of an item."""
    return stock_of(item)


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    model = OpenAIChatCompletionsModel(model=rollout.model, openai_client=rollout.client)
    agent = Agent(name="clerk", model=model, model_settings=ModelSettings(), tools=[stock])
    try:
        result = await Runner.run(
            agent, task["question"], max_turns=MAX_TURNS, run_config=RunConfig(tracing_disabled=True)
        )
    except MaxTurnsExceeded:
        return 0.0
    return score(str(result.final_output), task["item"])
