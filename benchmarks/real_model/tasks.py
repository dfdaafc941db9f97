"""The tasks of `learning`, and how they are answered and scored. TRL's Python imports this file too."""

import random
import re
from typing import Any


def load(split: str, seed: int) -> list[dict[str, str]]:
    """Return the distinct tasks of a split, each `question` and `answer`, in an order by seed. Half are held out."""
    import reasoning_gym  # here, because TRL's Python need not have it

    numbers = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    drawn: Any = reasoning_gym.create_dataset("chain_sum", size=4000, seed=0, **numbers)
    answers: dict[str, str] = {one["question"]: one["answer"] for one in drawn}
    tasks = [{"question": question, "answer": answers[question]} for question in sorted(answers)]
    random.Random(0).shuffle(tasks)
    chosen = tasks[::2] if split == "test" else tasks[1::2]
    random.Random(seed).shuffle(chosen)
    return chosen


def prompt(question: str) -> list[Any]:
    return [{"role": "user", "content": f"{question}\nGive only the result."}]


def score(text: str, answer: str) -> float:
    """Return 1.0 when the last number of a text is the answer, else 0.0."""
    return float(re.findall(r"-?\d+", text)[-1:] == [answer])


async def solve(task: dict[str, str], rollout: Any) -> float:
    messages = prompt(task["question"])
    reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
    return score(reply.choices[0].message.content or "", task["answer"])
