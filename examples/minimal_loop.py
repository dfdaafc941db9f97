"""The whole algorithm in one file: the paper's asynchronous loop over a workflow of your own.

    python examples/minimal_loop.py [key=value ...]     # about three minutes on two CPU cores

Rollouts go on in the background while `train_step` and `push` run. `push` interrupts them at a token boundary and swaps
the weights, and they go on under the new version: the agent sees only latency.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import sandboxes
from areal_agent import Rollout
from areal_agent.command import Parser, run_command
from areal_agent.config import Config
from areal_agent.run import Run

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

PYTHON_TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def open_pool(rollout: Rollout) -> Any:
    """Open the sandboxes that all rollouts of the run share."""
    return sandboxes.open_pool(**rollout.sandbox)


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Play one rollout: the model may run two programs, then it answers."""
    pool = await rollout.shared(open_pool)
    box = await rollout.enter(pool.acquire())
    messages: list[Any] = list(task["messages"])
    for _ in range(3):
        reply = await rollout.client.chat.completions.create(
            model=rollout.model,
            messages=messages,
            tools=[PYTHON_TOOL],  # pyright: ignore[reportArgumentType]
        )
        message: Any = reply.choices[0].message
        if not message.tool_calls:
            return float(task["answer"] in (message.content or ""))
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = await box.exec_python(json.loads(call.function.arguments).get("code", ""))
            output = (result.stdout or result.stderr).decode(errors="replace").strip()
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return 0.0


async def main(overrides: list[str]) -> None:
    config = Config.load(QUICKSTART, ["steps=10", *overrides])
    async with Run(config, workflow=solve, name="minimal_loop") as run:
        while run.step < config.steps:
            batch = await run.prepare_batch()  # whatever is ready within the staleness bound
            report = await run.train_step(batch)  # the decoupled objective, in the trainer's process
            pushed = await run.push()  # rollouts in flight go on under the new weights
            rewards = [trajectory.rewards.total for trajectory in batch.trained]
            print(
                f"step {run.step}: reward {sum(rewards) / len(rewards):.3f} over {len(rewards)} answers, "
                f"trained in {report.seconds:.1f} s, push stalled the engine for {pushed.stall_s * 1000:.0f} ms"
            )
        await run.save()
        print("checkpoint:", await run.saved())


def command() -> int:
    parser = Parser(prog="python examples/minimal_loop.py", description="The whole algorithm over one small workflow.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config, for example steps=3")
    asyncio.run(main(parser.parse_args().overrides))
    return 0


if __name__ == "__main__":
    run_command(command)
