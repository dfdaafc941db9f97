"""Math, judged by math-verify in processes of its own.

1. Equal answers are right, boxed or free, in any form; others are not. 2. The last box counts, or else the last line.
3. A hostile answer is wrong, and the judge goes on. 4. A task whose answer is no mathematics is an error. 5. Generated
problems are judged by their own answers; none is in both splits. 6. The workflow: a tool, then the answer.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from areal_agent.testing import play, tool_call
from envs.math.judge import Judge, open_judge
from envs.math.tasks import KINDS, load

pytest.importorskip("math_verify", reason="the extra `math` is not installed")

from envs.math.workflow import MAX_TURNS, solve


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge() -> AsyncIterator[Judge]:
    async with open_judge(cpu_s=0.6) as judge:
        yield judge


IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@IN_ONE_LOOP
@pytest.mark.parametrize(
    ("said", "right", "is_right"),
    [
        (r"So it is \boxed{0.5}.", r"\frac{1}{2}", True),
        (r"\boxed{\frac{2}{4}}", "0.5", True),
        ("The final answer is 1/2", r"\frac{1}{2}", True),
        ("It is 72.", "So he has 72.\n#### 72", True),
        (r"\boxed{(x+1)^2}", r"Then it is \boxed{x^2 + 2x + 1}.", True),
        (r"\boxed{\{3, 2\}}", r"\{2, 3\}", True),
        (r"\boxed{1,000}", "1000", True),
        (r"\boxed{0.51}", r"\frac{1}{2}", False),
        (r"First \boxed{7}, then \boxed{8}.", "7", False),
        ("7, or rather\n8", "7", False),
        (r"<think>\boxed{7}</think>I do not know.", "7", False),
        (r"<think>It may be \boxed{7}, or", "7", False),
        ("So it is\n$$\n\\frac{7}{2}\n$$", "3.5", True),
        ("So it is\n\\[\n\\frac{7}{2}\n\\]\n", "3.5", True),
        (r"\boxed{7", "7", False),
        (r"It is \boxed {7}.", "7", True),
        (r"\boxed{12\,345}", "12345", True),
        (r"\boxed{12345}", r"12\,345", True),
        (r"\boxed{2 + 3 = 5}", "5", True),
        (r"\boxed{4 = 5}", "5", False),
        (r"\boxed{1 = 2 = 5}", "5", False),
        (r"\boxed{\frac{1}{2} = 0.5}", "0.5", True),
        (r"\boxed{x = 5}", "5", True),
        (r"\boxed{\alpha = 5}", "5", True),
        (r"\boxed{x = 4 = 5}", "5", False),
        (r"\boxed{A = \pi r^2 = 25\pi}", r"25\pi", True),
        (r"\boxed{x = 2 \text{ or } x = 5}", r"\{2, 5\}", True),
        (r"\boxed{f(x) = x^2}", "x^2", True),
        (r"$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$", "(2, 2), (6, 2)", True),
        (r"\boxed{1},\boxed{2},\boxed{3}", r"\boxed{3} and \boxed{1} and \boxed{2}", True),
        (r"It is \boxed{5} or \boxed{7}.", "7", False),
        (r"\boxed{7} and \boxed{7}", "7", True),
        ("", "7", False),
        (r"\boxed{1, 2, 3, 4, 5, 6, 7}", "7", False),
    ],
)
async def test_what_is_right(judge: Judge, said: str, right: str, is_right: bool) -> None:
    assert await judge.is_right(said, right) is is_right


@IN_ONE_LOOP
async def test_a_task_without_mathematics_is_an_error(judge: Judge) -> None:
    with pytest.raises(ValueError, match="holds no mathematical expression; mend the task"):
        await judge.is_right(r"\boxed{7}", "")


@IN_ONE_LOOP
@pytest.mark.parametrize("kind", KINDS)
async def test_a_generated_answer_is_right(judge: Judge, kind: Any) -> None:
    for a, b in ((2, 9), (9, 2), (58, 59)):
        _, answer = kind(a, b)
        assert await judge.is_right(f"\\boxed{{{answer}}}", answer)


@IN_ONE_LOOP
async def test_many_are_judged_at_once(judge: Judge) -> None:
    answers = await asyncio.gather(*(judge.is_right(f"\\boxed{{{n}}}", "7") for n in range(20)))
    assert answers == [n == 7 for n in range(20)]


HOSTILE = {
    "a tower": r"\boxed{9**9**9**9}",
    "a tower in LaTeX": r"\boxed{9^{9^{9^{9}}}}",
    "a free tower": "9**9**9**9",
    "a factorial": r"\boxed{999999999!!}",
    "deep nesting": r"\boxed{" + "(" * 1_900 + "1" + ")" * 1_900 + "}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 300 + "1" + "}" * 300 + "}",
    "a megabyte": r"\boxed{" + "1" * 10**6 + "}",
    "a megabyte of boxes": r"\boxed{" * 150_000,
    "code": r"\boxed{__import__('os')._exit(0)}",
    "half a character": "\\boxed{\ud800}",
    "a line end": "\\boxed{\n\n\x00}",
}


@IN_ONE_LOOP
@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_answer_is_wrong_and_the_judge_goes_on(judge: Judge, said: str) -> None:
    assert await judge.is_right(said, "7") is False
    assert await judge.is_right(r"\boxed{7}", "7") is True


@IN_ONE_LOOP
async def test_a_process_that_died_between_two_answers_costs_none(judge: Judge) -> None:
    assert await judge.is_right(r"\boxed{7}", "7")
    num_killed = judge.processes.num_killed
    for process in judge.processes.idle:
        process.kill()
        await process.wait()
    assert await judge.is_right(r"\boxed{7}", "7") and judge.processes.num_killed == num_killed


def test_no_problem_is_in_both_splits() -> None:
    train, test = ({task["problem"] for task in load(split, 0)} for split in ("train", "test"))
    assert not train & test


def test_the_workflow() -> None:
    task = {"problem": "What is 6 times 7?", "answer": 42}  # a number, as JSON may have it
    run = tool_call("python", code="print(6 * 7)")
    for said, reward in (((run, r"\boxed{42}"), 1.0), ((r"\boxed{41}",), 0.0), ((run,) * MAX_TURNS, 0.0)):
        trajectory = play(solve, task, *said)
        assert (trajectory.rewards.final, trajectory.error) == (reward, None)
