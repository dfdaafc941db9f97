"""What has to hold of a run that fails, from the list of conformance cases: by number.

10. filtering restores capacity; a resume gives no burst
11. a weight transfer that fails or is corrupted leaves the old version serving
13. an engine killed in the middle of a turn leaves token stream, log-probabilities and spans consistent
14. a trainer killed at every commit point trains every rollout exactly once
"""

import asyncio
import itertools
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from areal_agent import Status
from areal_agent.engine.fake import FakeEngine
from areal_agent.errors import WeightUpdateError
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.rollout.producer import DynamicSampling
from areal_agent.tokens.records import token_records
from areal_agent.trainer.checkpoint import CommitPoint
from areal_agent.types import DiskWeights, SharedMemoryWeights, WeightVersion
from areal_agent.weights.push import push
from tests.histories import open_ledger
from tests.resume.lives import Zygote, check_end, check_life
from tests.rollout.test_producer import Script, numbers, producing, roll_out

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
MAX_STALENESS = 1


async def test_case_10_filtering_restores_capacity(tmp_path: Path) -> None:
    script = Script(statuses={0: [Status.ERROR, Status.TIMEOUT]}, rewards={1: [1.0, 1.0], 2: [1.0, 0.0]})
    sampling = DynamicSampling(max_flat_groups=3)
    async with producing(tmp_path, script, dynamic_sampling=sampling) as producer:
        assert numbers(await producer.take(1, 1)) == [2]
        assert script.started == [0, 1, 2], "one at a time: the bound has room for one group"
        assert (dict(producer.counts.drops), sampling.num_flat) == ({"error": 2, "filtered": 2}, 1)
        assert (producer.admission.running, producer.admission.finished, producer.admission.capacity) == (0, 0, 0)


async def test_case_10_a_resume_gives_no_burst(tmp_path: Path) -> None:
    """Three groups wait where the bound has room for two: none is started until two versions have made room."""
    async with open_ledger(tmp_path) as ledger:
        for group, index in itertools.product(range(3), range(2)):
            await roll_out(ledger, f"g{group:06d}-{index}", f"g{group:06d}", [0], Status.COMPLETED, float(index))

    script = Script(lambda number: [[producer.admission.step]] * 2)
    async with producing(tmp_path, script, max_staleness=MAX_STALENESS) as producer:
        most = []
        for step in (1, 2):
            assert numbers(await producer.take(step, 1)) == [step - 1]
            await let_others_run()
            most.append(len(script.started))
            producer.publish(step)
            await let_others_run()
        assert most == [0, 0]
        assert producer.admission.running + producer.admission.finished <= (MAX_STALENESS + 1) * 2


async def let_others_run() -> None:
    """The admit loop starts what it may before the event loop comes round."""
    for _ in range(20):
        await asyncio.sleep(0)


def damaged(weights: SharedMemoryWeights) -> SharedMemoryWeights:
    data = bytearray(Path(weights.path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(weights.path).write_bytes(data)
    return weights


def gone(weights: SharedMemoryWeights) -> SharedMemoryWeights:
    Path(weights.path).unlink()
    return weights


def foreign(weights: SharedMemoryWeights) -> SharedMemoryWeights:
    return replace(weights, entries=(replace(weights.entries[0], name="stranger"), *weights.entries[1:]))


@pytest.mark.parametrize("spoil", [damaged, gone, foreign])
async def test_case_11_a_bad_transfer_leaves_the_old_version_serving(spoil, tiny, other, serve, ask, share) -> None:
    async with serve(tiny) as served:
        engine = served.engine
        before = await engine.generate(ask(1))
        with pytest.raises(WeightUpdateError, match="the push of version 0:8"):
            await push([engine], spoil(share(other)), NEW)
        assert (await engine.generate(ask(1))).logprobs == pytest.approx(before.logprobs, abs=1e-5)
        assert (await engine.info()).weight_version == OLD
        await push([engine], share(other), NEW)
        after = await engine.generate(ask(1))
    assert {span.version for span in after.versions} == {NEW}
    assert after.logprobs != pytest.approx(before.logprobs, abs=1e-2)


async def test_case_13_an_engine_killed_in_mid_turn_leaves_consistent_records(open_world, tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    await ledger.begin_incarnation(0)
    answers = iter(["hello world<|im_end|>", "python name<|im_end|>", "python name<|im_end|>"])
    engine = FakeEngine(lambda _: world.ids(next(answers)), version=OLD, is_stepped=True)
    world = await open_world(engine=engine, journal=ledger.own, archive=ledger)
    agent = await world.start()

    async def answered(number: int, **body: object) -> tuple[int, dict]:
        """The answer to a call that a push interrupts after its first token."""
        call = asyncio.create_task(agent.post_chat(**body))
        await engine.wait_for_requests(number)
        engine.step(1)
        await push([engine], DiskWeights(path="new"), WeightVersion(step=OLD.step + number))
        engine.step(100)
        return await call

    status, first = await answered(1)
    assert status == 200
    messages = [
        {"role": "user", "content": "hello"},
        first["choices"][0]["message"],
        {"role": "user", "content": "python"},
    ]
    call = asyncio.create_task(agent.post_chat(messages=messages))
    await engine.wait_for_requests(2)
    engine.step(1)
    engine.die_after(0)
    assert (await call)[0] == 503
    engine.recover()
    status, _ = await answered(3, messages=messages)
    assert status == 200
    await agent.reward(reward=1.0)
    await agent.end()
    trajectory = await ledger.trajectory(agent.id)
    completions = [one for turn in trajectory.turns for one in turn.completions]
    assert [one.token_ids for one in completions] == [
        tuple(world.ids("hello world<|im_end|>")),
        tuple(world.ids("python name<|im_end|>")),
    ]
    for one in completions:
        assert len(one.logprobs) == len(one.token_ids) == len(one.version_steps())
    assert [sorted(set(one.version_steps())) for one in completions] == [[7, 8], [8, 10]]
    (record,) = token_records(trajectory)
    assert record.token_ids[record.loss_mask].tolist() == [id_ for one in completions for id_ in one.token_ids]
    await ledger.aclose()
    assert verify(tmp_path / "ledger.sqlite").violations == ()


@pytest.mark.slow
def test_case_14_a_trainer_killed_at_every_commit_point_trains_all_once(zygote: Zygote, tmp_path: Path) -> None:
    for point in CommitPoint:
        *said, death = zygote.live(tmp_path, fatal=point)
        last = [event for event in said if event != "answer"][-1]  # the gateway answers beside it
        assert (last, death) == (point, f"dead {-signal.SIGKILL}")
        check_life(tmp_path)
    assert zygote.live(tmp_path)[-1] == "dead 0"
    check_end(tmp_path)
