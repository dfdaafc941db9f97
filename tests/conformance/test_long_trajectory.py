"""A linear trajectory of 128 turns is one sequence, trained once: from the gateway through ledger and batch to a step.

1. its record is the last prompt and answer, token for token, each sampled token is in the loss once, and its fate is
`trained`, which the ledger proves; 2. a train step reads every token of it once, where turns one by one would be read
some sixty times as often.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.trainer.wire import StepInput
from areal_agent.types import Fate, GenerateRequest, RolloutBatch, Trajectory
from tests.gateway.conftest import VOCAB_SIZE, Agent, OpenWorld
from tests.rollout.test_producer import Script, make_producer
from tests.trainer.lab import Lab

NUM_TURNS = 128
GROUP = "g000000"
WORDS = ("hello", "world", "python", "name", "arguments")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rolled:
    """Two siblings of 128 turns each, as the gateway saw them and as the trainer is given them."""

    trajectories: tuple[Trajectory, ...]
    last_requests: dict[str, GenerateRequest]  # by session
    batch: RolloutBatch
    ledger: Path


async def play(agent: Agent) -> None:
    """A conversation that only ever grows."""
    messages: list[object] = []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": WORDS[turn % len(WORDS)]})
        status, reply = await agent.post_chat(messages=messages)
        assert status == 200, reply
        messages.append(reply["choices"][0]["message"])


@pytest.fixture
async def rolled(open_world: OpenWorld, tmp_path: Path) -> Rolled:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path, create=True)
    await ledger.begin_incarnation(0)

    def script(request: GenerateRequest) -> list[int]:
        return world.ids(f"{WORDS[len(request.input_ids) % len(WORDS)]}<|im_end|>")

    world = await open_world(script=script, journal=ledger.own, max_context_tokens=10_000)
    last_requests: dict[str, GenerateRequest] = {}
    for reward in (0.0, 1.0):
        agent = await world.start(group_id=GROUP)
        await play(agent)
        await agent.reward(reward=reward)
        await agent.end()
        last_requests[agent.id] = world.engine.requests[-1]
    producer = make_producer(ledger, Script(), None)
    await producer.restore(await ledger.ask(questions.waiting))
    batch = await producer.take(1, 1)
    await ledger.commit_checkpoint(1, "a checkpoint of step 1")
    trajectories = tuple([await ledger.trajectory(session_id) for session_id in last_requests])
    await ledger.aclose()
    return Rolled(trajectories=trajectories, last_requests=last_requests, batch=batch, ledger=path)


async def test_it_is_one_sequence_that_is_read_and_trained_once(
    rolled: Rolled, make_model: Callable[..., Path]
) -> None:
    assert sorted(one.session_id for one in rolled.batch.records) == sorted(rolled.last_requests)
    for trajectory in rolled.trajectories:
        (record,) = [one for one in rolled.batch.records if one.session_id == trajectory.session_id]
        answers = [one.token_ids for turn in trajectory.turns for one in turn.completions]
        assert len(answers) == NUM_TURNS
        last_prompt = rolled.last_requests[trajectory.session_id].input_ids
        assert record.token_ids.tolist() == [*last_prompt, *answers[-1]]
        assert record.token_ids[record.loss_mask].tolist() == [id_ for answer in answers for id_ in answer]
        assert trajectory.fate == Fate(trained_step=1)
    report = verify(rolled.ledger)
    assert report.is_ok, report
    lengths = [len(one.token_ids) for one in rolled.batch.records]
    rewards = {one.session_id: one.rewards.total for one in rolled.batch.trained}
    model = make_model(vocab_size=VOCAB_SIZE, max_position_embeddings=max(lengths))
    lab = Lab(model, budget=sum(lengths))
    metrics = await asyncio.to_thread(
        lab.stepper.train, StepInput(step=1, records=rolled.batch.records, rewards=rewards)
    )
    assert metrics["num_records"] == metrics["num_rollouts"] == 2
    assert metrics["num_input_tokens"] == sum(lengths) - 2  # nothing is predicted from a last token
    assert metrics["num_loss_tokens"] == sum(one.num_sampled_tokens for one in rolled.trajectories)
    prompts = sum(turn.fork_at + len(turn.new_prompt_ids) for one in rolled.trajectories for turn in one.turns)
    assert prompts > 50 * metrics["num_input_tokens"]
