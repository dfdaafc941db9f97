"""Tools with `strict: true`, by the official client:

- `parse` with a pydantic tool gets a call whose arguments are an object of that class; its echo is recognised
- a call that does not match the schema is text and counted, streamed; test_messages.py has whole answers, and tools
  that are not strict
- a schema that is invalid, refers elsewhere or needs backtracking is a 400 that names its place
"""

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from areal_agent.errors import RequestError
from areal_agent.gateway.tools import strict_tools

from .conftest import OpenAgent, OpenWorld


class Weather(BaseModel):
    """Look up the weather."""

    city: str
    unit: Literal["c", "f"]


TOOL = openai.pydantic_function_tool(Weather)
GOOD = '<tool_call>{"name": "Weather", "arguments": {"city": "Delft", "unit": "c"}}</tool_call>'
BAD = '<tool_call>{"name": "Weather", "arguments": {"city": "Delft", "unit": "k"}}</tool_call>'
HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_parse_gets_an_object_of_the_tools_class(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"{GOOD}<|im_end|>", "so<|im_end|>")
    reply = await agent.client.chat.completions.parse(model="model", messages=HELLO, tools=[TOOL])
    message = reply.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Delft", unit="c")
    answered = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    await agent.ask([*HELLO, message.model_dump(exclude_none=True, warnings="none"), answered], tools=[TOOL])
    assert agent.turns[1].parent == agent.turns[0].completions[0].id


@pytest.mark.parametrize(("said", "content", "num_calls"), [(BAD, BAD, 0), (f"ah {GOOD}", "ah", 1)])
async def test_streams_wait_for_the_whole_call(open_world: OpenWorld, said: str, content: str, num_calls: int) -> None:
    world = await open_world(f"{said}<|im_end|>")
    stream = await (await world.start()).ask(tools=[TOOL], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == content
    assert world.gateway.stats().malformed_tool_calls == 1 - num_calls
    assert sum(call.id is not None for delta in deltas for call in delta.tool_calls or ()) == num_calls


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 7},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": r"(a+)+\1$"}}},
    ],
)
def test_a_schema_that_cannot_be_checked_is_named(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    with pytest.raises(RequestError) as caught:
        strict_tools(tools)
    assert caught.value.param == "tools[0].function.parameters"
