"""The order of tasks: 1. a permutation goes through all, and every order may come; 2. each epoch uses every task once,
in an order that depends on the seed alone; 3. unshuffled as they come; 4. a mix keeps its shares at every position;
5. evaluation takes the first of each source, none twice."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent import ConfigError, Task
from areal_agent.rollout.draws import Mixture, TaskStream, in_order, permuted
from areal_agent.rollout.tasks import TaskSet, TaskSource


def tasks(num: int, name: str = "") -> tuple[Task, ...]:
    return tuple(Task(id=f"{name}{number}", data={}) for number in range(num))


def mixed(**sizes_and_weights: tuple[int, float]) -> TaskSet:
    return TaskSet(
        sources=tuple(
            TaskSource(name=name, weight=weight, tasks=tasks(size, f"{name}/"))
            for name, (size, weight) in sizes_and_weights.items()
        )
    )


@given(size=st.integers(1, 600), key=st.text(max_size=10))
def test_a_permutation_reaches_each_once(size: int, key: str) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_every_order_of_three_is_about_as_likely() -> None:
    orders = Counter(tuple(permuted(index, 3, f"key {key}") for index in range(3)) for key in range(1200))
    assert len(orders) == 6
    assert min(orders.values()) > 120, orders


def test_neighbours_are_torn_apart() -> None:
    places = [permuted(index, 10_000, "key") for index in range(10_000)]
    distances = [abs(one - other) for one, other in pairwise(places)]
    assert 3200 < sum(distances) / len(distances) < 3460, "a third of the size, as for independent places"


@given(size=st.integers(1, 40), seed=st.integers(0, 5))
def test_each_epoch_uses_every_task_once(size: int, seed: int) -> None:
    stream = TaskStream(TaskSet.of(tasks(size)), seed=seed)
    for epoch in range(3):
        ids = {stream.at(epoch * size + offset).id for offset in range(size)}
        assert len(ids) == size


def test_the_order_depends_on_the_seed_alone() -> None:
    set_of_20 = TaskSet.of(tasks(20))
    forward = [TaskStream(set_of_20, seed=1).at(n).id for n in range(40)]
    stream = TaskStream(set_of_20, seed=1)
    assert [stream.at(n).id for n in reversed(range(40))] == forward[::-1]
    assert [TaskStream(set_of_20, seed=2).at(n).id for n in range(40)] != forward
    assert forward[:20] != forward[20:], "each epoch has an order of its own"


def test_unshuffled_as_they_come() -> None:
    stream = TaskStream(TaskSet.of(tasks(3)), seed=1, shuffle=False)
    assert [stream.at(n).id for n in range(5)] == ["0", "1", "2", "0", "1"]


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    position=st.one_of(st.integers(0, 300), st.integers(10**12, 10**12 + 50)),
)
def test_a_mix_keeps_its_shares_at_every_position(weights: list[float], position: int) -> None:
    mixture = Mixture(weights)
    place = mixture.place(position)
    share = weights[place.source] / sum(weights)
    slack = 1 + place.source + position * 1e-3  # weights are taken to six digits
    assert abs(place.number - position * share) <= slack


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_a_mix_takes_from_each_source_one_after_the_other(weights: list[float]) -> None:
    mixture = Mixture(weights)
    seen: Counter[int] = Counter()
    for position in range(200):
        place = mixture.place(position)
        assert place.number == seen[place.source]
        seen[place.source] += 1


def test_the_sources_of_a_mix_have_epochs_of_their_own() -> None:
    stream = TaskStream(mixed(small=(2, 1.0), large=(100, 3.0)), seed=0)
    drawn = Counter(stream.at(position).id for position in range(80))
    assert [drawn["small/0"], drawn["small/1"]] == [10, 10]
    assert sum(drawn.values()) - 20 == len([id for id in drawn if id.startswith("large")]) == 60


def test_evaluation_takes_the_first_of_each_source() -> None:
    chosen = in_order(mixed(a=(10, 1.0), b=(10, 1.0)), 4, "eval.num_tasks")
    assert sorted(task.id for task in chosen) == ["a/0", "a/1", "b/0", "b/1"]


def test_evaluation_takes_no_task_twice() -> None:
    with pytest.raises(
        ConfigError, match=r"eval.num_tasks is 8, but there are only 6 such held-out tasks, each source in"
    ):
        in_order(mixed(a=(2, 1.0), b=(10, 1.0)), 8, "eval.num_tasks")


def test_the_fingerprint_tells_other_tasks_orders_and_weights() -> None:
    streams = [
        TaskStream(mixed(a=(2, 1.0), b=(3, 1.0)), seed=0),
        TaskStream(mixed(a=(3, 1.0), b=(2, 1.0)), seed=0),
        TaskStream(mixed(a=(2, 1.0), b=(3, 2.0)), seed=0),
        TaskStream(mixed(a=(2, 1.0), b=(3, 1.0)), seed=1),
        TaskStream(mixed(a=(2, 1.0), b=(3, 1.0)), seed=0, shuffle=False),
    ]
    assert len({stream.fingerprint() for stream in streams}) == len(streams)
    assert streams[0].fingerprint() == TaskStream(mixed(a=(2, 1.0), b=(3, 1.0)), seed=0).fingerprint()
