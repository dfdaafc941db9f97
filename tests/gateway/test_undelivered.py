"""An answer that never reached its agent is an orphan:

- if an agent hangs up while its turn is written, the completion is recorded and marked as undelivered
- so is that of a stream that broke off after its last token
- a delivered completion is not
"""

import asyncio
import contextlib
from typing import Any

from areal_agent.tokens.records import token_records

from .conftest import OpenWorld


async def hang_up(call: "asyncio.Task[Any]") -> None:
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def test_hanging_up_before_the_answer_leaves_an_orphan(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", "b<|im_end|>")
    agent = await world.start()
    delivered = await agent.ask("first")
    world.journal.may_write.clear()
    world.journal.is_writing.clear()
    call = asyncio.create_task(agent.post_chat())
    await world.journal.is_writing.wait()
    await hang_up(call)
    ending = asyncio.create_task(agent.end(status="timeout"))
    world.journal.may_write.set()
    await ending
    trajectory = world.journal.closed[agent.id]
    orphan = trajectory.turns[1].completions[0].id
    assert trajectory.undelivered == (orphan,)
    assert trajectory.turns[0].completions[0].id == delivered.id
    trained = sum(int(record.loss_mask.sum()) for record in token_records(trajectory))
    assert trained == len(trajectory.turns[0].completions[0].token_ids)


async def test_a_stream_without_its_end_is_an_orphan(open_world: OpenWorld) -> None:
    world = await open_world("ab<|im_end|>")
    agent = await world.start()
    world.journal.may_write.clear()
    stream = await agent.ask(stream=True)
    await world.journal.is_writing.wait()
    await stream.close()
    ending = asyncio.create_task(agent.end(status="timeout"))
    while (await agent.reward(reward=1))[0] == 200:  # until the end has begun
        pass
    world.journal.may_write.set()
    await ending
    trajectory = world.journal.closed[agent.id]
    assert trajectory.undelivered == (trajectory.turns[0].completions[0].id,)


async def test_what_was_delivered_is_no_orphan(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    agent = await world.start()
    await agent.ask()
    [_ async for _ in await agent.ask(stream=True)]
    await agent.client.completions.create(model="model", prompt="x")
    await agent.end()
    assert world.journal.closed[agent.id].undelivered == ()
    assert len(agent.turns) == 3
