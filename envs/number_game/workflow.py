"""One game: the model guesses, hears "higher" or "lower", and has eight turns."""

import re
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout

from .tasks import HIGHEST, LOWEST

MAX_TURNS = 8
RULES = f"Guess my number from {LOWEST} to {HIGHEST}."


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the model guesses the secret number in time, else 0.0."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": RULES}]
    for turn in range(1, MAX_TURNS + 1):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
        said = reply.choices[0].message.content or ""
        rollout.log(turns=turn)
        heard = answer(said, task["secret"])
        if heard == "right":
            return 1.0
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": heard})
    return 0.0


def answer(said: str, secret: int) -> str:
    """Return what the other player says to a guess.

    >>> answer("32", 40), answer("Is it 48?", 40), answer("40", 40), answer("I give up.", 40)
    ('higher', 'lower', 'right', 'say a number')
    """
    numbers: list[str] = re.findall(r"\d{1,4}", said)
    if not numbers:
        return "say a number"
    guess = int(numbers[-1])
    return "right" if guess == secret else "higher" if guess < secret else "lower"
