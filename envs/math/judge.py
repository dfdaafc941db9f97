"""Whether an answer is right. Processes of their own compare it, so an answer that hangs or kills one is merely wrong.

async with open_judge() as judge:
    await judge.is_right(r"So it is \\boxed{0.5}.", r"\\frac{1}{2}")
"""

import importlib.util
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from areal_agent import ConfigError
from envs.math.processes import Processes, open_processes

VERIFIER = Path(__file__).with_name("verifier.py")
CPU_S = 5.0
MAX_CHARACTERS = 4_000
"""The answer stands in the last characters of a text; of an older one, nothing is read."""
BOXED = r"\boxed{"
SPACED_BOX = re.compile(r"\\boxed\s+\{")
THIN_SPACE = re.compile(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))")
"""A space of LaTeX between thousands: `12\\,345`."""
JOINED = re.compile(r"(?:[ \t,;$&]|\\[,;:! ()]|\\q?quad|\\text\{ *(?:and|or) *\}|\b(?:and|or)\b)*$")
"""Stands between the boxes of one answer: `\\boxed{1}, \\boxed{2} and \\boxed{3}`."""
MAX_JOINED = 40
"""The longest of it, in characters."""


@asynccontextmanager
async def open_judge(cpu_s: float = CPU_S) -> AsyncGenerator["Judge"]:
    """Open a judge; leaving it ends its processes. Raises ConfigError where math-verify is not installed.

    An answer that takes longer than `cpu_s` is wrong.
    """
    require_math_verify()
    async with open_processes(VERIFIER, cpu_s) as processes:
        yield Judge(processes)


def require_math_verify() -> None:
    """Raise ConfigError where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("the package 'math-verify' is missing; install the extra: pip install 'areal-agent[math]'")


class Judge:
    """Compares answers in a few processes."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    async def is_right(self, said: str, right: str) -> bool:
        """Return whether the answer of a text is mathematically `right`.

        Raises ValueError when `right` is no mathematics, and SandboxError when no process can be started.
        """
        line = await self.processes.ask(final_answer(said), expected_answer(right))
        result = json.loads(line or b"false")
        if result is None:
            raise ValueError(f"the task's answer {right!r} holds no mathematical expression; mend the task")
        return result


def final_answer(said: str) -> str:
    r"""Return what is judged of a text, thoughts left out: the last box, or else the last line or displayed formula.

    Boxes with a comma, "and" or "or" between them are one answer.

    >>> final_answer(r"<think>\boxed{1}</think> First \boxed{2}, so \boxed{\frac{1}{2}}.")
    '\\boxed{\\frac{1}{2}}'
    >>> final_answer(r"First \boxed{5}. It is $\boxed{1}$ or $\boxed{x^{2}}$.")
    '\\boxed{1, x^{2}}'
    >>> final_answer("Half of it.\nThe final answer is 1/2\n")
    'The final answer is 1/2'
    >>> final_answer("So it is\n$$\n\\frac{1}{2}\n$$"), final_answer(r"<think>\boxed{1}")
    ('$$ \\frac{1}{2} $$', '')
    """
    text = _plain(said.rpartition("</think>")[2].partition("<think>")[0][-MAX_CHARACTERS:].strip())
    start = text.rfind(BOXED)
    if start < 0 and text.endswith(("$$", r"\]")):
        return text[max(text.rfind("$$", 0, -2), text.rfind(r"\["), 0) :].replace("\n", " ")
    if start < 0:
        return text.rpartition("\n")[2]
    end = _partner(text, start + len(BOXED) - 1)
    if end is None:
        return ""  # a box that is never closed
    inside = [text[start + len(BOXED) : end]]
    while (joined := JOINED.search(text, max(0, start - MAX_JOINED), start)) and joined.start() > 0:
        opening = _partner(text, joined.start() - 1) if text[joined.start() - 1] == "}" else None
        if opening is None or not text.endswith(BOXED, 0, opening + 1):
            break
        inside.insert(0, text[opening + 1 : joined.start() - 1])
        start = opening + 1 - len(BOXED)
    return f"{BOXED}{', '.join(dict.fromkeys(inside))}}}"


def _partner(text: str, place: int) -> int | None:
    """Return where the brace at `place` has its partner; None where there is none."""
    depth, step = 0, 1 if text[place] == "{" else -1
    for other in range(place, len(text) if step == 1 else -1, step):
        depth += {"{": 1, "}": -1}.get(text[other], 0)
        if depth == 0:
            return other
    return None


def expected_answer(right: str) -> str:
    r"""Return a task's answer as math-verify reads it: after GSM8K's `####`, the box of a solution, or the whole.

    >>> expected_answer("6 + 6 = 12\n#### 12"), expected_answer(r"So $x$ is \boxed{3}."), expected_answer("$x^2$")
    ('\\boxed{12}', '\\boxed{3}', '\\boxed{x^2}')
    """
    if BOXED in _plain(right):
        return final_answer(right)
    bare = _plain(right).rpartition("####")[2].strip().strip("$")
    return f"{BOXED}{bare}}}"


def _plain(text: str) -> str:
    return THIN_SPACE.sub("", SPACED_BOX.sub(lambda _: BOXED, text))
