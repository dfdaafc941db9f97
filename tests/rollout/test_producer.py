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
8. tasks that are given are rolled out and leased, each as a group, beside the stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_agent import Status, Task, Trajectory, TrajectoryGroup
from areal_agent.errors import RolloutsFailing
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.draws import Draws, TaskStream
from areal_agent.rollout.producer import DynamicSampling, Producer
from areal_agent.rollout.tasks import TaskSet
from areal_agent.staleness import Admission
from tests.histories import begin_rollout, end_rollout, open_ledger, trajectory

GROUP_SIZE = 2


async def roll_out(
    ledger: Ledger, session_id: str, group_id: str, versions: list[int], status: Status, reward: float
) -> Trajectory:
    """Record one rollout whose one answer was sampled under `versions`, token by token."""
    await begin_rollout(ledger, session_id, group_id)
    return await end_rollout(ledger, trajectory(session_id, versions, reward, group_id=group_id, status=status))


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
    ) -> None:
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
                self.ledger, f"{group_id}-{index}", group_id, versions[index], statuses[index], rewards[index]
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
