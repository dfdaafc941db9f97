"""Which task is next, over restarts, and which are passed over.

- The stream: every order may come; each epoch uses every task once, in an order that depends on the seed alone, or
  unshuffled as they come; a mix keeps its shares at every position; evaluation takes the first of each source, none
  twice.
- A group's id holds its position. What was cut off is drawn again, first, under a new id.
- Killed at any moment and resumed, every task of an epoch is settled exactly once: over the cursor alone, and over a
  real ledger and producer with commits, lost leases, failures and groups that are cut off.
- Other tasks begin a stream of their own; tasks of the caller's own have ids of their own.
- A curriculum's estimate follows what groups show, and forgets; tasks may share one. What is outside the band is
  passed over but for a share. Its state goes through JSON and decides the same.
"""

import asyncio
import json
import logging
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agent import ConfigError, Status, Task, Trajectory, TrajectoryGroup
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.rollout.config import CurriculumConfig
from areal_agent.rollout.draws import (
    Attempt,
    Curriculum,
    Draws,
    Estimate,
    Mixture,
    Past,
    TaskStream,
    in_order,
    open_draws,
    permuted,
)
from areal_agent.rollout.producer import Producer
from areal_agent.rollout.tasks import TaskSet, TaskSource
from areal_agent.staleness import Admission
from areal_agent.types import Drop, Fate
from tests.histories import begin_rollout, end_rollout, trajectory

NUM_TASKS = 5
GROUP_SIZE = 2
STREAM = TaskStream(TaskSet.of([Task(id=f"t{number}", data={}) for number in range(NUM_TASKS)]), seed=3)


def tasks_of(num: int, name: str = "") -> tuple[Task, ...]:
    return tuple(Task(id=f"{name}{number}", data={}) for number in range(num))


def mixed(**sizes_and_weights: tuple[int, float]) -> TaskSet:
    return TaskSet(
        sources=tuple(
            TaskSource(name=name, weight=weight, tasks=tasks_of(size, f"{name}/"))
            for name, (size, weight) in sizes_and_weights.items()
        )
    )


def test_every_order_of_three_is_about_as_likely() -> None:
    orders = Counter(tuple(permuted(index, 3, f"key {key}") for index in range(3)) for key in range(1200))
    assert len(orders) == 6
    assert min(orders.values()) > 120, orders


def test_neighbours_are_torn_apart() -> None:
    places = [permuted(index, 10_000, "key") for index in range(10_000)]
    distances = [abs(one - other) for one, other in pairwise(places)]
    assert 3200 < sum(distances) / len(distances) < 3460, "a third of the size, as for independent places"


@given(size=st.integers(1, 300), seed=st.integers(0, 5))
def test_each_epoch_uses_every_task_once(size: int, seed: int) -> None:
    stream = TaskStream(TaskSet.of(tasks_of(size)), seed=seed)
    for epoch in range(3):
        ids = {stream.at(epoch * size + offset).id for offset in range(size)}
        assert len(ids) == size


def test_the_order_depends_on_the_seed_alone_or_is_as_they_come() -> None:
    set_of_20 = TaskSet.of(tasks_of(20))
    forward = [TaskStream(set_of_20, seed=1).at(n).id for n in range(40)]
    stream = TaskStream(set_of_20, seed=1)
    assert [stream.at(n).id for n in reversed(range(40))] == forward[::-1]
    assert [TaskStream(set_of_20, seed=2).at(n).id for n in range(40)] != forward
    assert forward[:20] != forward[20:], "each epoch has an order of its own"
    stream = TaskStream(TaskSet.of(tasks_of(3)), seed=1, shuffle=False)
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


def test_evaluation_takes_the_first_of_each_source_and_none_twice() -> None:
    chosen = in_order(mixed(a=(10, 1.0), b=(10, 1.0)), 4, "eval.num_tasks")
    assert sorted(task.id for task in chosen) == ["a/0", "a/1", "b/0", "b/1"]
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


@given(position=st.integers(0, 10**8), number=st.integers(0, 40))
def test_a_group_bears_its_position(position: int, number: int) -> None:
    attempt = Attempt(position=position, number=number)
    assert Attempt.parse(attempt.group_id) == attempt


@pytest.mark.parametrize("group_id", ["t000001", "eval-before-0", "g1x", "g", "g000001r", "xg000001"])
def test_other_groups_bear_none(group_id: str) -> None:
    assert Attempt.parse(group_id) is None


def test_what_was_cut_off_is_drawn_again_first() -> None:
    past = Past.of({"g000000": False, "g000001": True, "g000003": False, "g000003r1": True}, since=0)
    draws = Draws(STREAM, past=past)
    drawn = [draws.draw() for _ in range(4)]
    assert [draw.group_id for draw in drawn] == ["g000001r1", "g000002", "g000003r2", "g000004"]
    assert [draw.task.id for draw in drawn] == [STREAM.at(position).id for position in (1, 2, 3, 4)]


def test_with_a_curriculum_a_gap_was_passed_over() -> None:
    past = Past.of({"g000000": True, "g000003": False}, since=0, skips_gaps=True)
    assert past.again == (Attempt(position=0, number=1),)


def test_tasks_of_the_callers_own_count_on() -> None:
    draws = Draws(STREAM, past=Past.of({"t000007": False, "g000002": False}, since=3))
    own = Task(id="own", data={})
    assert [draws.give(own).group_id, draws.draw().group_id, draws.give(own).group_id] == [
        "t000008",
        "g000003",
        "t000009",
    ]


@given(st.lists(st.sampled_from(["draw", "begin", "settle", "kill"]), max_size=150), st.randoms(use_true_random=False))
def test_killed_at_any_moment_each_task_of_an_epoch_is_settled_once(events: list[str], rng: random.Random) -> None:
    ledger: dict[str, bool] = {}  # by group: whether it was cut off
    settled: list[str] = []
    draws, drawn, running = Draws(STREAM), [], []
    for event in [*events, "kill"]:
        if event == "draw":
            drawn.append(draws.draw())
        elif event == "begin" and drawn:  # its first session is in the ledger
            running.append(drawn.pop(rng.randrange(len(drawn))))
            ledger[running[-1].group_id] = True
        elif event == "settle" and running:
            done = running.pop(rng.randrange(len(running)))
            ledger[done.group_id] = False
            settled.append(done.task.id)
        elif event == "kill":
            draws, drawn, running = Draws(STREAM, past=Past.of(ledger, since=0)), [], []
    first_new = Past.of(ledger, since=0).next_position
    while True:  # undisturbed, until what had been begun is settled
        draw = draws.draw()
        attempt = Attempt.parse(draw.group_id)
        if attempt.number == 0 and attempt.position >= first_new:
            break
        settled.append(draw.task.id)
    assert Counter(settled) == Counter(STREAM.at(position).id for position in range(first_new))


class Life:
    """One process of a run: a real producer over a real ledger. Groups end when `release` lets them."""

    def __init__(self, ledger: Ledger, step: int, rng: random.Random, sessions: dict[str, list[str]]) -> None:
        self.ledger = ledger
        self.sessions = sessions  # by group, over all lives
        self.step = self.committed = step
        self.rng = rng
        self.held: list[asyncio.Event] = []

    @classmethod
    async def begin(cls, folder: Path, step: int, rng: random.Random, sessions: dict[str, list[str]]) -> "Life":
        """Go on from the checkpoint of `step`."""
        ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
        await ledger.begin_incarnation(step)
        life = cls(ledger, step, rng, sessions)
        await life.start()
        return life

    async def start(self) -> None:
        self.producer = Producer(
            run_group=self.run_group,
            draws=await open_draws(STREAM, None, self.ledger),
            ledger=self.ledger,
            admission=Admission(
                batch_answers=GROUP_SIZE, max_staleness=1000, step=self.step, consumed=self.step * GROUP_SIZE
            ),
            group_size=GROUP_SIZE,
            straggler="wait",
            straggler_wait_s=0.0,
            max_concurrent=4 * GROUP_SIZE,
            max_failed_groups=100,
        )
        await self.producer.restore(await self.ledger.ask(questions.waiting))
        self.admitting = asyncio.create_task(self.producer.admit_forever())

    async def run_group(self, group_id: str, task: Task) -> TrajectoryGroup:
        is_failing = int(group_id[1:7]) % 4 == 3
        ended: list[Trajectory] = []
        for index in range(GROUP_SIZE):
            session_id = f"{group_id}-{index}"
            await begin_rollout(self.ledger, session_id, group_id, task.id)
            self.sessions.setdefault(group_id, []).append(session_id)
            event = asyncio.Event()
            self.held.append(event)
            await event.wait()
            status = Status.ERROR if is_failing else Status.COMPLETED
            rollout = trajectory(session_id, [0, 0], 1.0, group_id=group_id, task_id=task.id, status=status)
            ended.append(await end_rollout(self.ledger, rollout))
        return TrajectoryGroup(group_id=group_id, task_id=task.id, trajectories=tuple(ended))

    def release(self) -> None:
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held))).set()

    async def train(self) -> None:
        if self.producer.ready:
            await self.producer.take(self.step + 1, 1)
            self.step += 1
            self.producer.publish(self.step)

    async def kill(self) -> None:
        self.admitting.cancel()
        await asyncio.gather(self.admitting, return_exceptions=True)
        await self.ledger.aclose()

    async def act(self) -> None:
        """Something happens."""
        match self.rng.choice(["release", "release", "wait", "train", "commit"]):
            case "release":
                self.release()
            case "train":
                await self.train()
            case "commit":
                await self.ledger.commit_checkpoint(self.step, "checkpoint")
                self.committed = self.step
            case _:
                await self.ledger.ask(questions.counts)  # a while

    async def settle(self, num_positions: int) -> None:
        """Go on until every group before that position has ended and been trained, or has failed."""
        while True:
            self.release()
            await self.train()
            ended = {
                group_id
                for group_id, is_cut_off in (await self.ledger.ask(questions.drawn_groups)).items()
                if not is_cut_off
            }  # asked first: a group that ends in between is none of these
            waiting = {trajectory.group_id for trajectory in await self.ledger.ask(questions.waiting)}
            if set(range(num_positions)) <= {attempt.position for attempt in map(Attempt.parse, ended - waiting)}:
                return


async def live_and_die(folder: Path, rng: random.Random) -> tuple[Counter[str], int]:
    """Seven lives, each killed at a random moment; then one that settles whatever was begun.

    How often each task was trained, or failed as a whole, and how many positions were begun.
    """
    committed = 0
    sessions: dict[str, list[str]] = {}
    for _ in range(7):
        life = await Life.begin(folder, committed, rng, sessions)
        for _ in range(rng.randrange(60)):
            await life.act()
        committed = life.committed
        await life.kill()
    life = await Life.begin(folder, committed, rng, sessions)
    num_begun = Past.of(await life.ledger.ask(questions.drawn_groups), since=0).next_position
    await life.settle(num_begun)
    await life.ledger.commit_checkpoint(life.step, "checkpoint")
    await life.kill()
    report = verify(folder / "ledger.sqlite")
    assert report.is_ok, report
    return await count_settled(folder, sessions, num_begun), num_begun


async def count_settled(folder: Path, sessions: dict[str, list[str]], num_positions: int) -> Counter[str]:
    """By what became of every session, whatever the cursor says."""
    ledger = await Ledger.open(folder / "ledger.sqlite", create=False)
    await ledger.begin_incarnation(None)
    counts: Counter[str] = Counter()
    for group_id, session_ids in sessions.items():
        trajectories = [await ledger.trajectory(session_id) for session_id in session_ids]
        fates = [one.fate for one in trajectories]
        is_trained = any(fate is not None and fate.trained_step is not None for fate in fates)
        has_failed = fates == [Fate(dropped=Drop.ERROR)] * GROUP_SIZE
        position = Attempt.parse(group_id).position
        if position < num_positions and (is_trained or has_failed):
            counts[STREAM.at(position).id] += 1
    await ledger.aclose()
    return counts


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6))
def test_a_real_ledger_settles_each_task_once(seed: int) -> None:
    with TemporaryDirectory() as folder:
        counts, num_begun = asyncio.run(live_and_die(Path(folder), random.Random(seed)))
    assert counts == Counter(STREAM.at(position).id for position in range(num_begun))


async def test_other_tasks_begin_a_stream_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    await ledger.begin_incarnation(0)
    first = await open_draws(STREAM, None, ledger)
    for _ in range(3):
        draw = first.draw()
        await begin_rollout(ledger, f"{draw.group_id}-0", draw.group_id, draw.task.id)
    other = TaskStream(TaskSet.of([Task(id="other", data={})]), seed=3)
    with caplog.at_level(logging.WARNING):
        draws = await open_draws(other, None, ledger)
    again = await open_draws(other, None, ledger)
    await ledger.aclose()
    assert "are not those that this run began with" in caplog.text
    for one in (draws, again):
        draw = one.draw()
        assert (draw.group_id, draw.task.id) == ("g000003", "other")


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
