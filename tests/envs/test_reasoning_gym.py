"""Tasks of reasoning-gym.

1. Every task is drawn, and its scorer tells its own answer from garbage. 2. Tricks earn nothing. 3. A hostile answer is
wrong, and scoring goes on. 4. A seed draws the same tasks; no question is in both splits. 5. Levels come in order, and
parameters win. 6. A mixture, by the config. 7. Both workflows. 8. What is refused, and how.
"""

import asyncio
import json
from typing import Any

import pytest

from areal_agent import ConfigError
from areal_agent.rollout.config import TasksConfig
from areal_agent.rollout.tasks import load_tasks
from areal_agent.testing import play
from envs.math.processes import open_processes
from envs.reasoning_gym.gym import answer, draw
from envs.reasoning_gym.tasks import GYM, load
from envs.reasoning_gym.workflow import score_of, solve, solve_in_turns

factory = pytest.importorskip("reasoning_gym.factory", reason="the extra `reasoning-gym` is not installed")

MANY_RIGHT = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""They give no answer of their own, because many are right."""
SLOW = ("futoshiki", "knight_swap")  # almost a second a question
GARBAGE = ("", "x", "-7", "[[1, 2], [3]]", '{"a": 1}', "NaN", "1e999", "entry['answer']", "(" * 3_000, "\ud800\x00")


def drawn(name: str, split: str = "train", *, seed: int = 0, size: int = 1, **params: Any) -> list[dict[str, Any]]:
    return draw(split, seed, name, size, params.pop("levels", []), params)


def test_every_task_scores_its_own_answer_above_garbage() -> None:
    wrong: dict[str, object] = {}
    for name in set(factory.DATASETS) - {"composite", "game_of_life_halting", *SLOW}:
        (task,) = drawn(name)
        own, *others = (answer(task["dataset"], task["entry"], said) for said in (task["answer"], None, *GARBAGE))
        is_known = task["answer"] is not None and task["answer"] not in GARBAGE
        if is_known != (name not in MANY_RIGHT) or (is_known and own != 1.0) or max(others) > 0.5:
            wrong[name] = (task["answer"], own, others)
    assert not wrong


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("complex_arithmetic", "nan+nanj"),  # min(1.0, NaN) is 1.0
        ("spiral_matrix", 'entry["answer"].split()'),  # the scorer evaluates it
        ("n_queens", "eval(chr(49))"),
        ("puzzle24", "__import__('os')._exit(0)"),
    ],
)
def test_a_trick_earns_nothing(name: str, said: str) -> None:
    (task,) = drawn(name)
    assert answer(task["dataset"], task["entry"], said) <= 0.01


def test_a_hostile_answer_is_wrong_and_scoring_goes_on() -> None:
    async def scored() -> tuple[list[float], int]:
        task = drawn("polynomial_multiplication")[0]
        async with open_processes(GYM, cpu_s=1.0) as scorers:
            said = (task["answer"], "9**9**9**9", task["answer"])
            return [await score_of(task, one, scorers) for one in said], scorers.num_killed

    assert asyncio.run(scored()) == ([1.0, 0.0, 1.0], 1)


def test_tasks_depend_on_the_seed_and_no_question_is_in_both_splits() -> None:
    assert drawn("pool_matrix", size=5) == drawn("pool_matrix", size=5) != drawn("pool_matrix", seed=1, size=5)
    small = {"max_terms": 2, "max_digits": 1}  # 200 questions
    train, test = (
        {task["question"] for task in drawn("chain_sum", split, seed=seed, size=200, **small)}
        for split, seed in (("train", 0), ("test", 1))
    )
    assert len(train) > 90 and len(test) > 20 and not train & test


def test_levels_come_in_their_order_and_parameters_win() -> None:
    tasks = drawn("chain_sum", size=4, levels=[0, 3], min_digits=5, max_digits=5)
    assert [task["level"] for task in tasks] == ["chain_sum/0"] * 2 + ["chain_sum/3"] * 2
    numbers = [[word for word in task["question"].split() if word.isdigit()] for task in tasks]
    assert [len(one) for one in numbers] == [2, 2, 5, 5] and {len(word) for one in numbers for word in one} == {5}


def test_a_mixture_by_the_config() -> None:
    args = {"name": "isomorphic_strings", "size": 2}  # its generator iterates over sets
    one = {"source": "envs.reasoning_gym.tasks:load", "args": args, "name": "one"}
    other = {**one, "args": {**args, "scored": "message"}, "name": "other", "weight": 3}
    tasks = list(load_tasks(TasksConfig.model_validate({**one, "mix": [other]}), "train", 7))
    assert [task.id for task in tasks][::2] == [f"{name}/isomorphic_strings-train-7-0" for name in ("one", "other")]
    asked = [task.data["messages"][0]["content"].rpartition("\n\n") for task in tasks]
    assert asked[0][0] == asked[2][0] != asked[1][0]  # drawn twice
    assert "<answer>" in asked[0][2] and asked[2][2] == "Give only the result."
    assert json.loads(json.dumps(tasks[0].data)) == tasks[0].data  # as workers get it


def test_the_workflows() -> None:
    (task,) = load("train", 0, "gcd", size=1, attempts=2)
    right = f"<think><answer>0</answer></think><answer>1</answer> or <answer> {task['answer']} </answer>"
    for workflow, said, reward in (
        (solve, (task["answer"],), 0.0),  # without tags
        (solve_in_turns, ("<answer>no</answer>", right), 1.0),
    ):
        trajectory = play(workflow, task, *said)
        assert (trajectory.rewards.final, trajectory.error) == (reward, None)
        answer = task["answer"] if reward else None
        assert trajectory.logged == {"attempts": len(said), "answer": answer}


@pytest.mark.parametrize(
    ("name", "params", "error"),
    [
        ("chain_sums", {}, "no task 'chain_sums'; did you mean chain_sum"),
        ("chain_sum", {"max_term": 3}, "no parameter 'max_term'; did you mean max_terms"),
        ("chain_sum", {"max_terms": 0}, r"refuses chain_sum with {'max_terms': 0}: .*max_terms must be >="),
        ("chain_sum", {"levels": [99]}, "no level 99; its levels are 0 to 10"),
        ("acre", {"levels": [0]}, "acre has no levels"),
        ("composite", {}, "mix tasks with tasks.mix"),
    ],
)
def test_what_the_package_does_not_have(name: str, params: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        drawn(name, **params)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"name": "chain_sums"}, "no task 'chain_sums'"),
        ({"name": "chain_sum", "levels": 1}, "levels is 1; give a list"),
        ({"name": "chain_sum", "size": 0}, "size is 0; give a whole number"),
    ],
)
def test_what_is_refused_is_an_error_of_the_config(args: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load("train", 0, **args)
