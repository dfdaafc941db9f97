"""One task: the model sees the window, makes calls, and sees it again after each."""

from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.browser.chromium import TOOLS, Tab, open_browser
from envs.browser.site import Site

RULES = "You see a window of {width} x {height} pixels. Use the tools; after each call you see the window again."


async def browse(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the first form that the model sends is right, else 0.0.

    It ends with that form, with an answer without a call, or after `max_steps` calls.
    """
    site = Site(task)
    chromium = await rollout.shared(open_browser)
    tab = await rollout.enter(chromium.open(site, task["width"], task["height"]))
    goal = f"{task['goal']} {RULES.format(**task)}"
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": await seen(goal, tab)}]
    num_steps = num_errors = 0
    while num_steps < task["max_steps"] and site.sent is None:
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
        for call in message.tool_calls[: task["max_steps"] - num_steps]:
            is_function = call.type == "function"
            said = await tab.call(call.function.name, call.function.arguments) if is_function else "Error: no function"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": await seen(said, tab)})
            num_steps += 1
            num_errors += said.startswith("Error: ")
    rollout.log(kind=task["kind"], steps=num_steps, errors=num_errors)
    return float(site.is_right)


async def seen(text: str, tab: Tab) -> Any:
    """Return a text and what the window shows as a message's content. OpenAI's types know no pictures of tools."""
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": await tab.picture()}}]
