"""One episode: the model reads observations and answers with actions."""

import asyncio
import re
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.gymnasium.tasks import opened

NUMBER = re.compile(r"-?\d+")


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return the sum of the rewards up to the end of the episode, or of `max_turns` answers."""
    env = await asyncio.to_thread(opened, task["env"], task["options"])
    try:
        seen, _ = await asyncio.to_thread(env.reset, seed=task["seed"])
        text = f"{task['prompt']}\n\n{told(env, seen)}".strip()
        messages: list[ChatCompletionMessageParam] = []
        total = 0.0
        for turn in range(1, task["max_turns"] + 1):
            messages.append({"role": "user", "content": text})
            reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
            message = reply.choices[0].message
            messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
            action = action_of(env.action_space, message.content or "")
            rollout.log(turns=turn)
            if action is None:
                total += task["no_action"]
                text = f"That names no action. {ask_for(env.action_space)}"
                continue
            seen, reward, is_terminated, is_truncated, _ = await asyncio.to_thread(env.step, action)
            total += float(reward)
            if is_terminated or is_truncated:
                break
            text = told(env, seen)
        return total
    finally:
        await asyncio.to_thread(env.close)


def told(env: Any, seen: object) -> str:
    """Return an observation as text: itself if it is one, what `render_mode: ansi` draws, or its repr."""
    if isinstance(seen, str):
        return seen
    return str(env.render()) if env.render_mode == "ansi" else str(seen)


def ask_for(space: Any) -> str:
    """Return how an action is given.

    >>> from types import SimpleNamespace
    >>> ask_for(SimpleNamespace(n=4, start=0))
    'Give a number from 0 to 3.'
    """
    return (
        f"Give a number from {space.start} to {space.start + space.n - 1}."
        if hasattr(space, "n")
        else f"Give one of {space}."
    )


def action_of(space: Any, said: str) -> Any:
    """Return the action that an answer names: the last number in it, or all of it; None when it is no action."""
    if not hasattr(space, "n"):
        return said.strip() if space.contains(said.strip()) else None
    numbers = NUMBER.findall(said)
    action = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None
    return action if action is not None and space.contains(action) else None
