"""Where the time went, for a person: 1. the longest first, and crumbs left out; 2. the advice names the side that was
waited for, and why; 3. there is none without a step; 4. fewer threads are advised where there is more than one.
"""

import pytest

from areal_agent.observe.metrics import Spent
from areal_agent.observe.progress import advice, time_table


def spent(engine: dict[str, float], trainer: dict[str, float]) -> Spent:
    return Spent(wall_s=100.0, engine=engine, trainer=trainer)


def test_the_longest_first_and_crumbs_left_out() -> None:
    table = time_table(
        spent({"evaluating": 10.0, "generating": 89.7, "paused_for_push": 0.3}, {"training": 60.0, "pushing": 40.0})
    )
    lines = [line.split() for line in table.splitlines()]
    assert lines[1] == ["90%", "generating", "60%", "training"]
    assert lines[2] == ["10%", "evaluating", "40%", "pushing"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("engine", "trainer", "says"),
    [
        (
            {"generating": 90.0},
            {"waiting_for_rollouts": 60.0},
            "waited 60% of the time for rollouts, while the engine gen",
        ),
        ({"waiting_for_agents": 80.0}, {"waiting_for_rollouts": 60.0}, "rollout.max_concurrent"),
        ({"waiting_for_admission": 70.0}, {"waiting_for_rollouts": 30.0}, "let none run: try a larger max_staleness"),
        ({"waiting_for_gateway": 70.0}, {"waiting_for_rollouts": 30.0}, "rollout.workers"),
        ({"waiting_for_admission": 70.0}, {"training": 90.0}, "the engine waited 70% of the time for the trainer"),
        ({"generating": 70.0}, {"saving": 40.0, "waiting_for_rollouts": 30.0}, "trainer.checkpoint_every"),
        ({"generating": 95.0}, {"training": 95.0}, "neither side waited much"),
    ],
)
def test_the_advice_names_who_was_waited_for(engine: dict[str, float], trainer: dict[str, float], says: str) -> None:
    assert says in advice(spent(engine, trainer))


def test_there_is_none_without_a_step() -> None:
    assert advice(Spent.of([])) == ""


@pytest.mark.parametrize(("engine_threads", "is_told"), [(1, False), (2, True)])
def test_fewer_threads_are_advised_where_there_are_some(engine_threads: int, is_told: bool) -> None:
    steps = spent({"waiting_for_admission": 70.0}, {"training": 90.0})
    assert ("fewer engine.threads" in advice(steps, engine_threads=engine_threads)) is is_told
