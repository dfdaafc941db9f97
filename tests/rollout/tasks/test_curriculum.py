"""A curriculum by success rate: 1. an estimate follows what groups show, and forgets; 2. what is outside the band is
passed over but for a share, what is inside or unknown never; 3. tasks may share an estimate, by what all of them
have; 4. its state goes through JSON and decides the same."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent import ConfigError, Task
from areal_agent.rollout.tasks.config import CurriculumConfig
from areal_agent.rollout.tasks.draws import Curriculum, Draws, Estimate, Past
from areal_agent.rollout.tasks.loading import TaskSet
from areal_agent.rollout.tasks.stream import TaskStream

TASKS = [Task(id=f"t{number}", data={"level": number % 2}) for number in range(4)]


def curriculum(tasks: list[Task] = TASKS, **config: object) -> Curriculum:
    section = CurriculumConfig.model_validate({"low": 0.2, "high": 0.8, "outside": 0.1, **config})
    return Curriculum(section, tasks, seed=0, success_reward=1.0)


def test_an_estimate_is_the_mean_at_first() -> None:
    known = curriculum()
    known.learn("t0", [1.0, 0.0, 0.0, 0.5])
    known.learn("t0", [1.0, 1.0, 1.5, 0.0])
    assert known.estimate("t0") == Estimate(rate=0.5, num_groups=2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_estimate_stays_a_rate_and_forgets(shown: list[float]) -> None:
    estimate = Estimate()
    for success in shown:
        estimate = estimate.after(success)
        assert -1e-9 <= estimate.rate <= 1 + 1e-9
    for _ in range(20):
        estimate = estimate.after(1.0)
    assert estimate.rate > 0.99


@pytest.mark.parametrize(
    ("rewards", "share"), [([], 1.0), ([1.0, 0.0], 1.0), ([1.0, 1.0], 0.1), ([0.0, 0.0], 0.1)], ids=str
)
def test_outside_the_band_a_share_is_drawn(rewards: list[float], share: float) -> None:
    known = curriculum()
    if rewards:
        known.learn("t0", rewards)
    drawn = sum(known.draws(TASKS[0], position) for position in range(3000))
    assert drawn == 3000 if share == 1.0 else 240 < drawn < 360


def test_tasks_that_share_a_key_share_an_estimate() -> None:
    known = curriculum(by="level")
    known.learn("t0", [1.0])
    assert known.estimate("t2") == Estimate(rate=1.0, num_groups=1)
    assert known.estimate("t1") == Estimate()


def test_a_task_without_the_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"by is 'grade', but the data of task 't0' has no such key; it has level"):
        curriculum(by="grade")


def test_tasks_of_the_callers_own_teach_nothing() -> None:
    known = curriculum()
    known.learn("a stranger", [1.0])
    assert known.state() == {}


def test_its_state_goes_through_json_and_draws_the_same() -> None:
    stream = TaskStream(TaskSet.of(TASKS), seed=0)
    before, after = (Draws(stream, curriculum=curriculum(), past=Past(next_position=4)) for _ in range(2))
    for task, rewards in zip(TASKS, ([1.0], [1.0], [1.0], [1.0, 0.0]), strict=True):
        before.learn(task.id, rewards)
    after.restore(json.loads(json.dumps(before.state())))
    drawn = [before.draw() for _ in range(30)]
    assert [after.draw() for _ in range(30)] == drawn
    assert Counter(draw.task.id for draw in drawn)["t3"] > 15, "the others are always solved"
    assert before.num_passed_over > 30


def test_a_checkpoint_without_a_curriculum_restores_nothing() -> None:
    draws = Draws(TaskStream(TaskSet.of(TASKS), seed=0), curriculum=curriculum())
    draws.restore({})
    assert draws.state() == {"curriculum": {}}
