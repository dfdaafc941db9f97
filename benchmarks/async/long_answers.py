"""Answers with a long tail, whose lengths no model decides: each is as many tokens as were drawn for it."""

import random
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout

MEDIAN_TOKENS, SIGMA = 64, 1.0
FEWEST, MOST = 16, 400


def answer_tokens(generator: random.Random) -> int:
    """Draw from a lognormal, median 64 tokens, sigma 1.0, held within 16 and 400: mean 98, 95th percentile 331.

    Of 64 answers, which a step trains, two are of 400 tokens on average.
    """
    return round(min(MOST, max(FEWEST, MEDIAN_TOKENS * generator.lognormvariate(0.0, SIGMA))))


async def answer_at_length(task: dict[str, Any], rollout: Rollout) -> float:
    """Ask the quickstart's question once, for an answer of the drawn length. The reward is a coin's.

    Both depend only on the rollout's seed: the n-th draws the same in every mode.
    """
    generator = random.Random(rollout.seed)
    num_tokens = answer_tokens(generator)
    messages: list[ChatCompletionMessageParam] = list(task["messages"])
    await rollout.client.chat.completions.create(
        model=rollout.model, messages=messages, max_tokens=num_tokens, extra_body={"ignore_eos": True}
    )
    return float(generator.random() < 0.5)
