"""The problems as tasks of the two workflows, and which of them are held out."""

import random
from typing import Any, Literal

from envs.code.problems import lists, numbers, strings
from envs.code.problems.problem import Problem

Split = Literal["train", "test"]

PROBLEMS = (*lists.PROBLEMS, *strings.PROBLEMS, *numbers.PROBLEMS)
HELD_OUT_EVERY = 5
WRITE = """\
Write this function in Python.

def {signature}:
    {asked}

For example, {examples}. Try it with the tool `python` if you like, then hand it in with the tool `submit`."""
REPAIR = """\
This function does not do what it should: {asked}

```python
{program}
```

For example, {examples}. Repair it; the tool `run_tests` runs a version on a few tests, others judge the last one."""


def load(split: Split, seed: int) -> list[dict[str, Any]]:
    """Return the functions to write (`write.py`), in an order given by the seed."""
    return [task_of(problem, WRITE, "write") for problem in problems_of(split, seed)]


def load_repairs(split: Split, seed: int) -> list[dict[str, Any]]:
    """Return the programs to repair (`repair.py`), in an order given by the seed."""
    return [task_of(problem, REPAIR, "repair") for problem in problems_of(split, seed)]


def problems_of(split: Split, seed: int) -> list[Problem]:
    """Return the problems of a split. Every fifth one is held out, whatever the seed."""
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; valid: 'train', 'test'")
    is_test = split == "test"
    chosen = [problem for index, problem in enumerate(PROBLEMS) if (index % HELD_OUT_EVERY == 0) == is_test]
    return random.Random(f"problems/{seed}").sample(chosen, len(chosen))


def task_of(problem: Problem, wording: str, kind: str) -> dict[str, Any]:
    visible = problem.cases(problem.visible)
    examples = " and ".join(f"{problem.name}({', '.join(map(repr, args))}) is {result!r}" for args, result in visible)
    text = wording.format(
        signature=problem.signature, asked=problem.asked, program=problem.broken_program, examples=examples
    )
    return {
        "id": f"{kind}-{problem.name}",
        "messages": [{"role": "user", "content": text}],
        "function": problem.name,
        "visible": visible,
        "cases": visible + problem.cases(problem.hidden),
    }
