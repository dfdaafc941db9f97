"""The policies in a whole run without torch: gateway, workflows of two turns, producer and ledger are real, the engine
is scripted and samples when it is told to.

- interrupt: answers under way bear both versions, each its part
- turn_boundary: no answer bears two versions; a rollout under way has turns of both
- drain: no rollout bears two versions; the push waits until those under way have ended, and none begins meanwhile
- after a push that failed the old version serves, the next one works, and rollouts begin again
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_agent.engine.fake import FakeEngine
from areal_agent.errors import WeightUpdateError
from areal_agent.rollout.producer import Producer
from areal_agent.types import DiskWeights, PauseMode, Trajectory, WeightVersion
from areal_agent.weights.push import OnPush, PushReport, push_under
from tests.resume.scripted_run import answer, open_stage

OLD, NEW = WeightVersion(step=0), WeightVersion(step=1)
NUM_UNDER_WAY = 12  # rollouts that the staleness bound lets begin under the first weights


async def solve(task: Any, rollout: Any) -> float:
    messages = list(task["messages"])
    for _ in range(2):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    return float(rollout.seed % 3)


class WatchedEngine(FakeEngine):
    """Tells of pauses."""

    def __init__(self) -> None:
        super().__init__(answer, version=OLD, max_context_tokens=4096, is_stepped=True)
        self.has_paused = asyncio.Event()
        self.in_flight_at_pause = -1

    async def pause(self, mode: PauseMode) -> None:
        self.in_flight_at_pause = self.num_in_flight
        self.has_paused.set()
        await super().pause(mode)


@dataclass(kw_only=True)
class Stage:
    """A run whose first rollouts have each sampled one token of their first answer."""

    engine: WatchedEngine
    producer: Producer
    group: asyncio.TaskGroup
    sampling: asyncio.Task[None] | None = None

    def begin_push(self, policy: OnPush) -> asyncio.Task[PushReport]:
        weights = DiskWeights(path="no_such_folder")
        return asyncio.create_task(push_under(policy, [self.engine], weights, NEW, drained=self.producer.drained))

    def sample(self) -> None:
        """From now on whatever is asked is answered, unless the engine is paused."""
        self.engine.step(10)
        if self.sampling is None:
            self.sampling = self.group.create_task(self._keep_sampling())

    async def _keep_sampling(self) -> None:
        while True:
            await self.engine.wait_for_requests(len(self.engine.requests) + 1)
            self.engine.step(10)

    async def all_rollouts(self) -> list[Trajectory]:
        """Those that were under way at the push, and the four that the new version lets begin; in four batches."""
        self.sample()
        self.producer.publish(NEW.step)
        batches = [await self.producer.take(step, 2) for step in (1, 2, 3, 4)]
        return [one for batch in batches for group in batch.groups for one in group.trajectories]


@asynccontextmanager
async def a_run(folder: Path, model: Path) -> AsyncGenerator[Stage]:
    async with (
        open_stage(
            folder, model, lambda _: WatchedEngine(), num_steps=2, workflow=solve, max_concurrent=2 * NUM_UNDER_WAY
        ) as opened,
        asyncio.TaskGroup() as group,
    ):
        engine = opened.engine
        assert isinstance(engine, WatchedEngine)
        producing = group.create_task(opened.producer.admit_forever())
        await engine.wait_for_requests(NUM_UNDER_WAY)
        engine.step()
        stage = Stage(engine=engine, producer=opened.producer, group=group)
        yield stage
        for task in (producing, stage.sampling):
            if task is not None:
                task.cancel()


Spans = list[tuple[int, int]]
"""Version and end of each span of one answer."""


def answers(trajectory: Trajectory) -> list[Spans]:
    """The two answers of a rollout."""
    first, second = (turn.completions[0] for turn in trajectory.turns)
    return [[(span.version.step, span.end) for span in one.versions] for one in (first, second)]


def sorted_answers(trajectories: list[Trajectory]) -> list[list[Spans]]:
    assert len(trajectories) == NUM_UNDER_WAY + 4
    return sorted(map(answers, trajectories))


async def test_interrupt_goes_on_in_mid_answer(tmp_path: Path, small_model: Path) -> None:
    async with a_run(tmp_path, small_model) as run:
        await run.begin_push("interrupt")
        ended = sorted_answers(await run.all_rollouts())
    assert ended == [[[(0, 1), (1, 3)], [(1, 3)]]] * NUM_UNDER_WAY + [[[(1, 3)], [(1, 3)]]] * 4


async def test_turn_boundary_never_splits_an_answer(tmp_path: Path, small_model: Path) -> None:
    async with a_run(tmp_path, small_model) as run:
        push = run.begin_push("turn_boundary")
        await run.engine.has_paused.wait()
        assert run.engine.in_flight_at_pause == NUM_UNDER_WAY
        run.sample()
        await push
        ended = sorted_answers(await run.all_rollouts())
    assert ended == [[[(0, 3)], [(1, 3)]]] * NUM_UNDER_WAY + [[[(1, 3)], [(1, 3)]]] * 4


async def test_drain_lets_rollouts_end_first(tmp_path: Path, small_model: Path) -> None:
    async with a_run(tmp_path, small_model) as run:
        push = run.begin_push("drain")
        run.sample()
        await push
        assert run.engine.in_flight_at_pause == 0
        ended = sorted_answers(await run.all_rollouts())
    assert ended == [[[(0, 3)], [(0, 3)]]] * NUM_UNDER_WAY + [[[(1, 3)], [(1, 3)]]] * 4


async def test_after_a_push_that_failed_the_next_one_works(tmp_path: Path, small_model: Path) -> None:
    async with a_run(tmp_path, small_model) as run:
        run.engine.corrupt_next_push()
        push = run.begin_push("drain")
        run.sample()
        with pytest.raises(WeightUpdateError):
            await push
        await run.begin_push("drain")
        ended = sorted_answers(await run.all_rollouts())
    assert ended == [[[(0, 3)], [(0, 3)]]] * NUM_UNDER_WAY + [[[(1, 3)], [(1, 3)]]] * 4
