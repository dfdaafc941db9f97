"""Groups on their way to a batch, over a real ledger, with scripted rollouts.

1. admission holds groups back at the bound, and a published version lets them in;
2. `wait`: a batch waits for the group that would be too stale for the next one;
3. `drop`: trajectories beyond the bound are dropped(stale), their siblings trained; a group stale as a whole
   gives its capacity back;
4. `mask`: only stale tokens leave the loss;
5. failed siblings get their fate at once, a group that failed as a whole is replaced;
6. the oldest groups go first;
7. dynamic sampling: a group without spread is filtered and replaced, with its capacity; what restarts leave waiting is
   judged too; when group after group is flat, that ends the run and says so;
8. tasks that are given are rolled out and leased, each as a group, beside the stream;
9. which groups have no spread: rewards alike, within rounding, named parts by their weights included. Totals that are
   alike and were earned in other turns are told apart, and so are, with a discount, rollouts of other lengths, and
   parallel samples of one call; what has no token to train does not count, and one rollout alone has no spread; where
   turns are compared by their states, turns of one rollout are told apart; a flat group is one whose advantages are
   zero, whatever its rewards; flat groups in a row are counted until one is not.
10. rollouts with altered tokens alone are dropped for that reason, and with dynamic sampling the error has the remedy;
11. with `train_roots: main` only the main conversation's tokens are leased, and the ledger is verified.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent import Rewards, Status, Task, Trajectory, TrajectoryGroup
from areal_agent.algorithms.advantages import token_advantages
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.credit import with_causal_credit
from areal_agent.errors import RolloutsFailing
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.rollout.draws import Draws, TaskStream
from areal_agent.rollout.producer import DynamicSampling, Producer
from areal_agent.rollout.tasks import TaskSet
from areal_agent.staleness import Admission
from areal_agent.tokens.loss_rule import LossRule, TrainRoots
from areal_agent.tokens.records import token_records
from areal_agent.types import Distribution, Turn
from tests.histories import begin_rollout, completion, end_rollout, open_ledger, trajectory, turn

GROUP_SIZE = 2


async def roll_out(
    ledger: Ledger, session_id: str, group_id: str, versions: list[int], status: Status, reward: float, **changes: Any
) -> Trajectory:
    """Record one rollout whose one answer was sampled under `versions`, token by token."""
    await begin_rollout(ledger, session_id, group_id)
    made = trajectory(session_id, versions, reward, group_id=group_id, status=status, **changes)
    return await end_rollout(ledger, made)


class Script:
    """Runs groups as told: `versions(number)` gives each sibling's versions; held groups wait until released."""

    ledger: Ledger

    def __init__(
        self,
        versions: Callable[[int], list[list[int]]] = lambda number: [[0], [0]],
        *,
        statuses: dict[int, list[Status]] | None = None,
        rewards: dict[int, list[float]] | None = None,
        held: tuple[int, ...] = (),
        turns: Callable[[str], tuple[Turn, ...]] | None = None,
    ) -> None:
        self.turns = turns  # of a session, instead of one answer
        self.versions = versions
        self.statuses = statuses or {}
        self.rewards = rewards or {}
        self.held = {number: asyncio.Event() for number in held}
        self.started: list[int] = []

    async def run_group(self, group_id: str, task: Task) -> TrajectoryGroup:
        number = int(group_id[1:])
        self.started.append(number)
        versions = self.versions(number)
        if number in self.held:
            await self.held[number].wait()
        statuses = self.statuses.get(number, [Status.COMPLETED] * GROUP_SIZE)
        rewards = self.rewards.get(number, [1.0] * GROUP_SIZE)
        siblings = [
            await roll_out(
                self.ledger,
                session_id := f"{group_id}-{index}",
                group_id,
                versions[index],
                statuses[index],
                rewards[index],
                **({"turns": self.turns(session_id)} if self.turns else {}),
            )
            for index in range(GROUP_SIZE)
        ]
        return TrajectoryGroup(group_id=group_id, task_id=task.id, trajectories=tuple(siblings))


def make_producer(
    ledger: Ledger,
    script: Script,
    dynamic_sampling: DynamicSampling | None,
    *,
    max_staleness: int = 0,
    straggler: str = "wait",
    rule: LossRule | None = None,
) -> Producer:
    script.ledger = ledger
    return Producer(
        run_group=script.run_group,
        draws=Draws(TaskStream(TaskSet.of([Task(id="0", data={})]), seed=0)),
        ledger=ledger,
        admission=Admission(batch_answers=GROUP_SIZE, max_staleness=max_staleness),
        group_size=GROUP_SIZE,
        straggler=straggler,
        straggler_wait_s=60.0,
        max_concurrent=64,
        max_failed_groups=3,
        rule=rule,
        dynamic_sampling=dynamic_sampling,
    )


@asynccontextmanager
async def producing(
    tmp_path: Path, script: Script, dynamic_sampling: DynamicSampling | None = None, **settings: Any
) -> AsyncGenerator[Producer]:
    async with open_ledger(tmp_path) as ledger:
        producer = make_producer(ledger, script, dynamic_sampling, **settings)
        await producer.restore(await ledger.ask(questions.waiting))
        admitting = asyncio.create_task(producer.admit_forever())
        try:
            yield producer
        finally:
            admitting.cancel()
            await asyncio.gather(admitting, return_exceptions=True)


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 (the producer has no event for tests)
            await asyncio.sleep(0.005)


def numbers(batch) -> list[int]:
    return [int(group.group_id[1:]) for group in batch.groups]


async def test_the_bound_holds_groups_back_until_a_version_is_published(tmp_path: Path) -> None:
    script = Script()
    async with producing(tmp_path, script, max_staleness=1) as producer:
        await settled(lambda: len(producer.ready) == 2)
        assert script.started == [0, 1]
        assert numbers(await producer.take(1, 1)) == [0]
        assert script.started == [0, 1], "consumed, but its version is not published"
        producer.publish(1)
        await settled(lambda: script.started == [0, 1, 2])


async def test_drained_lets_groups_end_and_none_start(tmp_path: Path) -> None:
    script = Script(held=(1,))
    async with producing(tmp_path, script, max_staleness=1) as producer:
        await settled(lambda: script.started == [0, 1] and len(producer.ready) == 1)
        async with AsyncExitStack() as stack:
            entering = asyncio.create_task(stack.enter_async_context(producer.drained()))
            await asyncio.sleep(0)
            script.held[1].set()
            await entering
            assert producer.admission.running == 0
            await producer.take(1, 1)
            producer.publish(1)
            await asyncio.sleep(0)
            assert script.started == [0, 1], "there is room under the bound, and nothing starts"
        await settled(lambda: script.started == [0, 1, 2])


async def test_drained_does_not_wait_for_groups_that_were_cut_off(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with producing(tmp_path, Script(held=(0,))) as producer:
            await settled(lambda: producer.admission.running > 0)
            entering = asyncio.create_task(stack.enter_async_context(producer.drained()))
            await asyncio.sleep(0)
        await asyncio.wait_for(entering, 10.0)
        assert (producer.admission.running, producer.running) == (0, {})


async def test_drained_does_not_wait_for_a_group_that_was_cut_off_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, drawn = Draws.draw, list[str]()

    def one_alone(draws: Draws) -> Any:
        if drawn:
            raise RuntimeError("in the same step of the event loop")
        drawn.append("one")
        return draw(draws)

    monkeypatch.setattr(Draws, "draw", one_alone)
    script = Script()
    async with producing(tmp_path, script, max_staleness=1) as producer:
        await settled(lambda: bool(drawn))
        async with asyncio.timeout(10), producer.drained():
            assert (script.started, producer.running) == ([], {})


async def test_a_group_that_ends_cancelled_gives_its_capacity_back(tmp_path: Path) -> None:
    def versions(number: int) -> list[list[int]]:
        if number == 0:
            raise asyncio.CancelledError
        return [[0], [0]]

    async with producing(tmp_path, Script(versions)) as producer, asyncio.timeout(60):
        assert numbers(await producer.take(1, 1)) == [1]


async def test_wait_waits_for_the_group_that_would_be_too_stale(tmp_path: Path) -> None:
    script = Script(lambda number: [[min(number, 1)]] * 2, held=(0,))
    async with producing(tmp_path, script, max_staleness=1) as producer:
        assert numbers(await producer.take(1, 1)) == [1], "the slow group may still be used in step 2"
        producer.publish(1)
        await settled(lambda: len(producer.ready) == 1)
        taking = asyncio.create_task(producer.take(2, 1))
        await asyncio.sleep(0.05)
        assert not taking.done()
        script.held[0].set()
        assert numbers(await taking) == [0]


async def test_drop_drops_what_is_stale_and_keeps_its_siblings(tmp_path: Path) -> None:
    script = Script(lambda number: [[0, 2], [2, 2]])
    async with producing(tmp_path, script, straggler="drop") as producer:
        batch = await producer.take(3, 1)
        assert [one.session_id for one in batch.trained] == ["g000000-1"]
        assert dict(producer.counts.drops) == {"stale": 1}


async def test_a_group_that_is_stale_as_a_whole_gives_its_capacity_back(tmp_path: Path) -> None:
    script = Script(lambda number: [[0], [0]] if number == 0 else [[2], [2]])
    async with producing(tmp_path, script, straggler="drop") as producer:
        assert numbers(await producer.take(3, 1)) == [1]
        assert dict(producer.counts.drops) == {"stale": 2}


async def test_mask_takes_only_stale_tokens_out_of_the_loss(tmp_path: Path) -> None:
    script = Script(lambda number: [[0, 2, 2], [2, 2, 2]])
    async with producing(tmp_path, script, straggler="mask") as producer:
        batch = await producer.take(3, 1)
    masks = {record.session_id: record.loss_mask.tolist() for record in batch.records}
    assert masks == {"g000000-0": [False] * 3 + [True] * 2, "g000000-1": [False] * 2 + [True] * 3}


async def test_failed_siblings_get_their_fate_and_failed_groups_are_replaced(tmp_path: Path) -> None:
    script = Script(statuses={0: [Status.ERROR, Status.TIMEOUT], 1: [Status.INFRA, Status.COMPLETED]})
    async with producing(tmp_path, script) as producer:
        batch = await producer.take(1, 1)
        assert (numbers(batch), [one.session_id for one in batch.trained]) == ([1], ["g000001-1"])
        assert dict(producer.counts.drops) == {"error": 2, "infra": 1}
        assert dict(producer.counts.statuses) == {"error": 1, "timeout": 1, "infra": 1, "completed": 1}


async def test_the_oldest_groups_go_first(tmp_path: Path) -> None:
    script = Script(lambda number: [[2 - number]] * 2)
    async with producing(tmp_path, script, max_staleness=2) as producer:
        await settled(lambda: len(producer.ready) == 3)
        assert numbers(await producer.take(1, 1)) == [2]


async def test_flat_groups_that_a_restart_finds_waiting_are_filtered(tmp_path: Path) -> None:
    script = Script(rewards={0: [1.0, 0.0]})
    async with open_ledger(tmp_path) as ledger:
        for index in range(GROUP_SIZE):
            await roll_out(ledger, f"g000009-{index}", "g000009", [0], Status.COMPLETED, 1.0)
    sampling = DynamicSampling(max_flat_groups=3)
    async with producing(tmp_path, script, dynamic_sampling=sampling) as producer:
        assert numbers(await producer.take(1, 1)) == [0]
        assert dict(producer.counts.drops) == {"filtered": 2}


async def test_tasks_that_are_given_are_rolled_out_and_leased(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        producer = make_producer(ledger, Script(), None)
        batch = await producer.roll_out(1, [Task(id=name, data={}) for name in ("7", "9")])
        assert [(group.task_id, len(group.trajectories)) for group in batch.groups] == [("7", 2), ("9", 2)]
        leased = {one.session_id for one in await ledger.ask(questions.leased, 1)}
    assert leased == {one.session_id for one in batch.trained} and len(leased) == 2 * GROUP_SIZE
    assert (producer.admission.running, producer.admission.consumed) == (0, 2 * GROUP_SIZE)


async def test_only_flat_groups_end_the_run(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        producer = make_producer(ledger, Script(), DynamicSampling(max_flat_groups=5))
        with pytest.raises(ExceptionGroup) as failure:
            async with asyncio.timeout(60):
                await producer.admit_forever()
    (reason,) = failure.value.exceptions
    assert isinstance(reason, RolloutsFailing)
    assert "5 groups in a row had no spread in reward, the last was task '0': 2 rollouts, each with reward 1" in str(
        reason
    )


def altered(session_id: str) -> tuple[Turn, ...]:
    answer = completion(f"{session_id}-c", [0, 0], distribution=Distribution.ALTERED)
    return (turn(f"{session_id}-t", answer),)


async def test_a_rollout_with_altered_tokens_alone_is_dropped_for_that(tmp_path: Path) -> None:
    async with producing(tmp_path, Script(turns=altered)) as producer:
        assert (await producer.take(1, 1)).trained == ()
        assert dict(producer.counts.drops) == {"altered": 2}


async def test_groups_that_are_flat_because_of_altered_tokens_end_the_run_with_the_remedy(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        producer = make_producer(ledger, Script(turns=altered), DynamicSampling(max_flat_groups=2))
        with pytest.raises(ExceptionGroup) as failure:
            async with asyncio.timeout(60):
                await producer.admit_forever()
    (reason,) = failure.value.exceptions
    assert "0 of 2 rollouts had a token to train. The tokens of the others are altered" in str(reason)
    assert dict(producer.counts.drops) == {"altered": 4}


def title_and_dialogue(session_id: str) -> tuple[Turn, ...]:
    """A title of one token, then a dialogue of two and three."""
    title, first, second = (completion(f"{session_id}-{number}", [0] * number) for number in (1, 2, 3))
    asked = [({"role": "user", "content": text},) for text in ("title", "solve")]
    return (
        turn(f"{session_id}-title", title, request_delta=asked[0]),
        turn(f"{session_id}-first", first, request_delta=asked[1]),
        turn(f"{session_id}-second", second, parent=first.id, fork_at=4),
    )


async def test_the_main_conversation_alone_is_leased_and_verified(tmp_path: Path) -> None:
    rule = LossRule(roots=TrainRoots.MAIN)
    script = Script(turns=title_and_dialogue)
    async with producing(tmp_path, script, rule=rule) as producer:
        batch = await producer.take(1, 1)
        await script.ledger.commit_checkpoint(1, "checkpoints/step_000001")
    assert sum(int(record.loss_mask.sum()) for record in batch.records) == GROUP_SIZE * (2 + 3)
    report = verify(tmp_path / "ledger.sqlite")
    assert (report.violations, report.num_trained_tokens) == ((), GROUP_SIZE * (2 + 3))


def rollout(
    rewards: Rewards, *, num_turns: int = 1, num_samples: int = 1, distribution: Distribution = Distribution.EXACT
) -> Trajectory:
    """Its answers are `0a`, `1a`, ...; the last turn may have parallel samples, `0b`."""
    last = num_turns - 1
    names = [["0a", "0b"][:num_samples] if number == last == 0 else [f"{number}a"] for number in range(num_turns)]
    turns = [
        turn(
            f"t{number}",
            *(completion(name, [0, 0], distribution=distribution) for name in of_turn),
            parent=f"{number - 1}a" if number else None,  # it goes on with the first answer of the turn before it
            fork_at=4 * number,
            started_s=float(number),
            ended_s=number + 0.5,
        )
        for number, of_turn in enumerate(names)
    ]
    return trajectory("s", [], 0.0, task_id="7", turns=tuple(turns), rewards=rewards)


def siblings(*rollouts: Trajectory) -> list[Trajectory]:
    return [replace(one, session_id=f"g-{index}") for index, one in enumerate(rollouts)]


def is_flat(rollouts: Sequence[Trajectory], *, rule: LossRule | None = None, **settings: object) -> bool:
    algorithm = AlgorithmConfig.model_validate(settings)
    return DynamicSampling(max_flat_groups=10, algorithm=algorithm, rule=rule or LossRule()).replaces(
        siblings(*rollouts)
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([Rewards(final=1.0), Rewards(final=1.0)], True),
        ([Rewards(final=0.1 + 0.2), Rewards(final=0.3)], True),
        ([Rewards(final=1e8), Rewards(final=1e8 + 1)], True),
        ([Rewards(final=0.0), Rewards(final=1e-3)], False),
        ([Rewards(final=-1.0), Rewards(final=1.0)], False),
        ([Rewards(final=1.0, parts={"short": 1.0}), Rewards(final=1.0, parts={"short": 0.0})], False),
        ([Rewards(final=1.0, parts={"other": 1.0}), Rewards(final=1.0)], True),
        ([Rewards(final=0.5, parts={"short": 1.0}), Rewards(final=1.0)], True),
        ([Rewards(final=1.0), Rewards(by_completion={"0a": 1.0})], True),
        ([Rewards(final=1.0)], True),
    ],
    ids=range(10),
)
def test_groups_without_spread_are_flat(rewards: list[Rewards], expected: bool) -> None:
    sampling = DynamicSampling(max_flat_groups=10, algorithm=AlgorithmConfig(reward_parts={"short": 0.5}))
    assert sampling.replaces(siblings(*map(rollout, rewards))) is expected
    assert sampling.num_flat == int(expected)


def of_turns(*by_completion: dict[str, float], num_turns: int = 2, **sizes: int) -> list[Trajectory]:
    return [rollout(Rewards(by_completion=one), num_turns=num_turns, **sizes) for one in by_completion]


SOONER_AND_LATER = [rollout(Rewards(final=1.0), num_turns=num_turns) for num_turns in (1, 2)]
WITHOUT_A_TOKEN = [rollout(Rewards(final=0.0), distribution=Distribution.ALTERED), *[rollout(Rewards(final=1.0))] * 2]


@pytest.mark.parametrize(
    ("rollouts", "settings", "expected"),
    [
        pytest.param(of_turns({"0a": 1.0}, {"1a": 1.0}), {}, False, id="other turns"),
        pytest.param(of_turns({"0a": 1.0, "1a": 0.0}, {"0a": 0.0, "1a": 1.0}), {}, False, id="values swapped"),
        pytest.param(of_turns({"0a": 1.0, "1a": 0.5}, {"1a": 0.5, "0a": 1.0}), {}, True, id="told in another order"),
        pytest.param(SOONER_AND_LATER, {"discount": 1.0}, True, id="no discount"),
        pytest.param(SOONER_AND_LATER, {"discount": 0.5}, False, id="the sooner, with a discount"),
        # rollouts earn the same on the mean of their parallel samples
        pytest.param(of_turns(*[{"0a": 0.5, "0b": 0.5}] * 2, num_turns=1, num_samples=2), {}, True, id="samples alike"),
        pytest.param(of_turns(*[{"0a": 1.0, "0b": 0.0}] * 2, num_turns=1, num_samples=2), {}, False, id="samples"),
        pytest.param(WITHOUT_A_TOKEN, {"rule": LossRule()}, True, id="no token to train"),
        pytest.param(WITHOUT_A_TOKEN, {"rule": LossRule(trains_altered=True)}, False, id="altered tokens are trained"),
        pytest.param(of_turns(*[{"0a": 1.0}] * 2), {"step_group_weight": 0.0}, True, id="turns are not compared"),
        pytest.param(of_turns(*[{"0a": 1.0}] * 2), {"step_group_weight": 1.0}, False, id="turns that meet in a state"),
    ],
)
def test_what_is_told_apart(rollouts: list[Trajectory], settings: dict[str, Any], expected: bool) -> None:
    assert is_flat(rollouts, **settings) is expected


few = st.sampled_from([0.0, 0.5, 1.0])
rollouts_of_any_kind = st.builds(
    rollout,
    st.builds(
        Rewards,
        final=st.none() | few,
        by_completion=st.dictionaries(st.sampled_from(["0a", "0b", "1a", "2a"]), few, max_size=2),
    ),
    num_turns=st.integers(1, 3),
    num_samples=st.integers(1, 2),
    distribution=st.sampled_from(Distribution),
)


@given(
    rollouts=st.lists(rollouts_of_any_kind, min_size=1, max_size=3),
    discount=st.sampled_from([1.0, 0.5]),
    step_group_weight=st.sampled_from([0.0, 0.5]),
    advantage=st.sampled_from(["dr_grpo", "rloo"]),
)
def test_all_advantages_of_a_flat_group_are_zero(
    rollouts: list[Trajectory], discount: float, step_group_weight: float, advantage: str
) -> None:
    if not is_flat(rollouts, discount=discount, step_group_weight=step_group_weight):
        return
    config = AlgorithmConfig(advantage=advantage, discount=discount, step_group_weight=step_group_weight)
    records = [record for one in siblings(*rollouts) for record in token_records(one) if record.loss_mask.any()]
    for of_record in token_advantages(with_causal_credit(records, discount), config):
        assert of_record.abs().max() < 1e-5


def test_flat_groups_in_a_row_are_too_many_in_the_end() -> None:
    sampling = DynamicSampling(max_flat_groups=2)
    right, wrong = rollout(Rewards(final=1.0)), rollout(Rewards(final=0.0))
    seen = []
    for one in (siblings(right, right), siblings(right, wrong), siblings(right, right), siblings(right, right)):
        sampling.replaces(one)
        seen.append(sampling.is_exhausted)
    assert (seen, sampling.num_flat) == ([False, False, False, True], 3)
    assert "2 groups in a row had no spread in reward, the last was task '7': 2 rollouts, each with reward 1" in (
        sampling.describe()
    )


def test_a_group_with_nothing_to_train_says_so() -> None:
    sampling = DynamicSampling(max_flat_groups=1)
    altered = rollout(Rewards(final=1.0), distribution=Distribution.ALTERED)
    assert sampling.replaces(siblings(altered, rollout(Rewards(final=0.0))))
    assert "task '7': 1 of 2 rollouts had a token to train" in sampling.describe()
