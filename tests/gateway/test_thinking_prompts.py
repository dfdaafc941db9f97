"""A chat template that begins every answer inside the reasoning:

- text before the closing tag is reasoning, the rest is content, whole and streamed alike
- an answer that never closes it is all reasoning, and can be continued
- a forced call ends the reasoning first, unless the template does not open it there
"""

import pytest
from tokenizers import Tokenizer

from areal_agent.tokens.renderer import Renderer

from .conftest import QUESTION, TEMPLATE, OpenAgent, OpenWorld, new_renderer

PYTHON = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_reasoning_ends_at_its_tag(open_world: OpenWorld, thinking_renderer: Renderer, is_streamed: bool) -> None:
    world = await open_world("well, so\n</think>\n\nhello<|im_end|>", model=thinking_renderer)
    reply = await (await world.start()).ask(stream=is_streamed)
    messages = [chunk.choices[0].delta async for chunk in reply] if is_streamed else [reply.choices[0].message]
    assert "".join(getattr(message, "reasoning_content", "") for message in messages) == "well, so"
    assert "".join(message.content or "" for message in messages) == "hello"


async def test_reasoning_that_never_ends_is_all(open_agent: OpenAgent, thinking_renderer: Renderer) -> None:
    agent = await open_agent("well, so", "ok</think>yes<|im_end|>", model=thinking_renderer)
    reply = await agent.ask(QUESTION, max_tokens=len(agent.world.ids("well, so")))
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content, reply.choices[0].finish_reason) == ("well, so", "", "stop")
    assert reply.usage.completion_tokens_details.reasoning_tokens == len(agent.world.ids("well, so"))
    await agent.ask([*QUESTION, message, {"role": "user", "content": "y"}])
    assert agent.turns[1].parent == reply.id


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_forced_call_ends_the_reasoning(
    open_agent: OpenAgent, thinking_renderer: Renderer, is_streamed: bool
) -> None:
    agent = await open_agent(' {"code": "1"}}</tool_call><|im_end|>', "</think>so<|im_end|>", model=thinking_renderer)
    choice = {"type": "function", "function": {"name": "python"}}
    reply = await agent.ask(QUESTION, tools=[PYTHON], tool_choice=choice, stream=is_streamed)
    messages = [chunk.choices[0].delta async for chunk in reply] if is_streamed else [reply.choices[0].message]
    calls = [call for message in messages for call in message.tool_calls or ()]
    assert calls[0].function.name == "python"
    assert "".join(call.function.arguments for call in calls) == '{"code": "1"}'
    assert all(not getattr(message, "reasoning_content", "") and not message.content for message in messages)
    call = {"id": calls[0].id, "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    await agent.ask([*QUESTION, answer, {"role": "tool", "tool_call_id": call["id"], "content": "1"}], tools=[PYTHON])
    assert agent.turns[1].parent == agent.turns[0].completions[0].id


async def test_a_forced_call_ends_no_reasoning_that_is_not_open(open_agent: OpenAgent, backend: Tokenizer) -> None:
    thinks_after_questions = TEMPLATE.replace(
        "assistant\\n' }}{%- endif %}",
        "assistant\\n' + ('<think>\\n' if messages[-1].role == 'user' else '') }}{%- endif %}",
    )
    model = new_renderer(backend, thinks_after_questions)
    agent = await open_agent("hm</think>so<|im_end|>", ' {"code": "1"}}</tool_call><|im_end|>', model=model)
    answer = (await agent.ask(QUESTION)).choices[0].message
    choice = {"type": "function", "function": {"name": "python"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    reply = await agent.ask([*QUESTION, answer, result], tools=[PYTHON], tool_choice=choice)
    assert agent.world.renderer.text_of(agent.world.engine.requests[1].input_ids, has_ended=False).endswith(
        '<|im_start|>assistant\n<tool_call>{"name": "python", "arguments":'
    )
    assert reply.choices[0].message.tool_calls[0].function.arguments == '{"code": "1"}'
    assert not reply.choices[0].message.content
