"""The reward: when an answer is right."""

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<!\d)-?\d+")


def score(said: str, outputs: Iterable[str], answer: str) -> float:
    """Return 1.0 when the last number of the final message is `answer` and a program printed it, else 0.0.

    >>> score("The answer is 71625.", ["71625"], "71625")
    1.0
    >>> score("The answer is 71625.", [], "71625"), score("It worked.", ["71625"], "71625")
    (0.0, 0.0)
    """
    came_through_the_tool = any(last_number(output) == answer for output in outputs)
    return float(came_through_the_tool and last_number(said) == answer)


def last_number(text: str) -> str | None:
    """Return the last whole number of a text, as it is written; None when there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None
