"""x"""
from typing import Any
import pytest
from .conftest import Agent, OpenAgent

TOOLS: list[Any] = [{"type": "function", "name": "python", "parameters": {"type": "object"}, "strict": False},
  {"type": "custom", "name": "sh"}]
ANSWERS = (
    '<think>hmm</think>let me see <tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'
    '<tool_call>{"name": "sh", "arguments": {"input": "ls"}}</tool_call><|im_end|>',
    "hello world<|im_end|>",
)

@pytest.mark.parametrize("streamed", [False, True])
async def test_one(open_agent: OpenAgent, streamed: bool) -> None:
    agent = await open_agent(*ANSWERS)
    items: list[Any] = [{"role": "user", "content": "x"}]
    for _ in range(2):
        if streamed:
            async with agent.client.responses.stream(model="model", input=items, tools=TOOLS, instructions="be") as s:
                async for e in s:
                    print(e)
                r = await s.get_final_response()
        else:
            r = await agent.client.responses.create(model="model", input=items, tools=TOOLS, instructions="be")
        print(r.model_dump_json(indent=1))
        items += r.output
        items += [{"type": x.type + "_output", "call_id": x.call_id, "output": "4"} for x in r.output if "call" in x.type]
        items += [{"role": "user", "content": "and?"}]
    print(agent.turns)
    assert agent.turns[1].parent == r.id or agent.turns[1].parent
    assert [t.fork_reason for t in agent.turns] == 1
