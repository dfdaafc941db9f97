"""The model answers, and the scorer of the task's own data set is the reward: at once, or after further attempts."""

import json
import re
from contextlib import AbstractAsyncContextManager
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.math.processes import Processes, open_processes
from envs.reasoning_gym.tasks import GYM

CPU_S = 5.0
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
VERDICT = "That scores {:.2g} of 1. Try again."


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return the score of the answer, from 0 to 1."""
    return await converse(task, rollout, 1)


async def solve_in_turns(task: dict[str, Any], rollout: Rollout) -> float:
    """Return the score of the last answer. One that scores less than 1 may be tried again, up to `attempts` in all."""
    return await converse(task, rollout, task["attempts"])


async def converse(task: dict[str, Any], rollout: Rollout, attempts: int) -> float:
    scorers = await rollout.shared(open_scorers)
    messages: list[ChatCompletionMessageParam] = list(task["messages"])
    score = 0.0
    for attempt in range(1, attempts + 1):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
        message = reply.choices[0].message
        answer = answer_of(message.content or "", task["scored"])
        score = await score_of(task, answer, scorers)
        rollout.log(attempts=attempt, answer=answer)
        if score == 1.0:
            break
        messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
        messages.append({"role": "user", "content": VERDICT.format(score)})
    return score


def open_scorers(_rollout: Rollout) -> AbstractAsyncContextManager[Processes]:
    """Open the processes that all rollouts of a run share."""
    return open_processes(GYM, CPU_S)


async def score_of(task: dict[str, Any], answer: str | None, scorers: Processes) -> float:
    """Return what the data set's scorer gives; 0 for an answer that hangs or kills it."""
    score = json.loads(await scorers.ask(task["dataset"], task["entry"], answer) or b"0.0")
    if score is None:
        raise ValueError(f"the task {task['id']!r} cannot be read; was it drawn with another reasoning-gym?")
    return score


def answer_of(said: str, scored: str) -> str | None:
    """Return what is scored of a message, thoughts left out: of `tags` or `numbers` the last, or the whole `message`.

    >>> answer_of("<think><answer>1</answer></think>Two: <answer> 2 </answer>", "tags")
    '2'
    >>> answer_of("<think>1</think> 2", "message"), answer_of("<think>It is 2", "message")
    ('2', '')
    >>> answer_of("3 - 7 = -4.", "numbers"), answer_of("It is four.", "numbers")
    ('-4', None)
    """
    text = said.rpartition("</think>")[2].partition("<think>")[0]
    if scored == "message":
        return text.strip()
    found: list[str] = {"tags": TAGGED, "numbers": NUMBER}[scored].findall(text)
    return found[-1].strip() if found else None
