"""One task: the model sees the window, makes calls, and sees it again after each."""

from typing import Any

from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam

from areal_agent import Rollout
from envs.browser.chromium import Tab, definitions, open_browser
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
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": await said(goal, tab)}]
    num_steps = num_errors = 0
    while num_steps < task["max_steps"] and site.sent is None:
        reply = await rollout.client.chat.completions.create(
            model=rollout.model, messages=messages, tools=definitions()
        )
        message = reply.choices[0].message
        messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
        if not message.tool_calls:
            break
        for call in message.tool_calls[: task["max_steps"] - num_steps]:
            num_steps += 1
            heard = (
                await tab.call(call.function.name, call.function.arguments)
                if call.type == "function"
                else "Error: call a function"
            )
            num_errors += heard.startswith("Error: ")
            content: Any = await said(heard, tab)  # OpenAI's own types have no pictures in what a tool answers
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    rollout.log(kind=task["kind"], steps=num_steps, errors=num_errors)
    return float(site.is_right)


async def said(text: str, tab: Tab) -> list[ChatCompletionContentPartParam]:
    """Return a text and what the window shows as the content of a message."""
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": await tab.picture()}}]
