"""The gateway with the real ledger: a session with tools, forks, several answers, an aborted answer and digits beyond
64 bits reads back unchanged, and `ledger verify` finds no error. test_kill_storm.py has many sessions at once.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.tokens.records import token_records
from areal_agent.types import FinishReason, ForkReason, Status

from .conftest import OpenWorld

CALL = '<tool_call>{"name": "f", "arguments": {"n": 1180591620717411303424}}</tool_call><|im_end|>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def test_a_session_reads_back_as_it_was(open_world: OpenWorld, ledger: Ledger, tmp_path: Path) -> None:
    world = await open_world(
        CALL, "a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "defg", journal=ledger.own, is_stepped=True
    )

    async def answered(call: Coroutine[Any, Any, Any], num_requests: int) -> Any:
        task = asyncio.create_task(call)
        await world.engine.wait_for_requests(num_requests)
        world.engine.step(1000)
        return await task

    agent = await world.start()
    question = [{"role": "user", "content": "2**70?"}]
    first = await answered(agent.ask(question, tools=TOOLS), 1)
    message = first.choices[0].message
    more = [*question, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "so"}]
    second = await answered(agent.ask(more, tools=TOOLS), 2)
    await answered(agent.ask(more, tools=TOOLS, n=2), 4)
    hanging = asyncio.create_task(agent.post_chat())
    await world.engine.wait_for_requests(5)
    world.engine.step(2)
    await agent.reward(reward=1)
    await agent.reward(reward=0.5, interaction_id=second.id)
    await agent.end(logged={"n": 1})
    await hanging

    trajectory = await ledger.trajectory(agent.id)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.rewards.total == 1.5
    assert [turn.fork_reason for turn in trajectory.turns] == [
        None,
        None,
        ForkReason.REPEATED,
        ForkReason.NEW_CONVERSATION,
    ]
    assert trajectory.turns[3].completions[0].finish_reason is FinishReason.ABORT
    _, exported = await world.call("/export_trajectories", {"session_id": agent.id})
    restarted = await open_world(journal=ledger.own)  # knows nothing of the session but by the ledger
    status, answer = await restarted.call("/rl/start_session", {"task_id": "t", "session_id": agent.id})
    assert (status, answer["error"]["code"]) == (409, "session_exists")
    assert [record["token_ids"] for record in exported["records"]] == [
        record.token_ids.tolist() for record in token_records(trajectory)
    ]
    assert verify(tmp_path / "ledger.sqlite").violations == ()
