"""One question about one picture."""

from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout

QUESTION = "What colour is the square?"


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the model names the colour of the square, and nothing else, else 0.0."""
    reply = await rollout.client.chat.completions.create(model=rollout.model, messages=[asked(task["picture"])])
    return float(reward(reply.choices[0].message.content or "", task["colour"]))


def asked(picture: str) -> ChatCompletionMessageParam:
    """Return the question with its picture, a data URL."""
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}],
    }


def reward(said: str, colour: str) -> bool:
    """Return whether an answer is right.

    >>> reward(" Red.", "red"), reward("red or blue", "red")
    (True, False)
    """
    return said.strip(" .\n").lower() == colour
