"""Chat completions, by the official client:

- an answer has its text, finish reason, usage and an id of its own
- tool calls reach the agent, their result reaches the model, and the sampled tokens are reused verbatim
- a call without arguments may come back with an empty text or null as its arguments
- a malformed call is text and counted
- `n` answers are sampled with different seeds and rewarded by their own ids
- sampling parameters reach the engine: the request's, else the session's, else the defaults
- max_tokens is reduced to the room in the context; a full context is OpenAI's error
- text parts are joined, `developer` becomes `system`, both paths and the default model work
- without a seed, the same place in a session with the same seed gets the same one; a repetition gets another
- the journal has the prompt, ids, log-probabilities, version spans, messages and distribution
- partial UTF-8 and special tokens in an answer are no error
"""

import asyncio

import openai
import pytest

from areal_agent.engine.fake import fake_logprob
from areal_agent.types import DiskWeights, Distribution, FinishReason, ForkReason, PauseMode, WeightVersion

from .conftest import OpenAgent, OpenWorld

TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(2**70)", "n": 1180591620717411303424}}</tool_call>'


async def test_an_answer_has_text_and_usage(open_agent: OpenAgent) -> None:
    agent = await open_agent("hello world<|im_end|>", "so<|im_end|>")
    reply = await agent.ask("hi")
    assert reply.choices[0].message.content == "hello world"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(agent.world.engine.requests[0].input_ids)
    assert reply.usage.completion_tokens == len(agent.world.ids("hello world<|im_end|>"))
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.id.startswith("chatcmpl-")
    assert (await agent.ask("hi")).id != reply.id


async def test_tools_and_verbatim_tokens(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"let me see{CALL}<|im_end|>", "it is big<|im_end|>")
    messages: list[object] = [{"role": "user", "content": "2**70?"}]
    first = (await agent.ask(messages, tools=TOOLS)).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "let me see"
    assert call.function.name == "python"
    assert call.function.arguments == '{"code": "print(2**70)", "n": 1180591620717411303424}'
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "1180591620717411303424"}]
    await agent.ask(messages, tools=TOOLS)
    one, two = agent.world.engine.requests
    sampled = tuple(agent.world.ids(f"let me see{CALL}<|im_end|>"))
    assert two.input_ids[: len(one.input_ids) + len(sampled)] == one.input_ids + sampled
    assert agent.turns[1].parent == agent.turns[0].completions[0].id
    assert agent.turns[1].fork_reason is None
    assert [message["role"] for message in agent.turns[1].request_delta] == ["tool"]


@pytest.mark.parametrize("arguments", ["", " ", "{ }", None])
async def test_a_call_without_arguments_is_recognised(open_agent: OpenAgent, arguments: str | None) -> None:
    agent = await open_agent('<tool_call>{"name": "python", "arguments": {}}</tool_call><|im_end|>', "so<|im_end|>")
    question = {"role": "user", "content": "go"}
    reply = await agent.ask([question], tools=TOOLS)
    answer = reply.choices[0].message.model_dump()
    answer["tool_calls"][0]["function"]["arguments"] = arguments
    await agent.ask([question, answer, {"role": "tool", "tool_call_id": "x", "content": "1"}], tools=TOOLS)
    assert agent.turns[1].parent == reply.id


async def test_a_malformed_call_is_text_and_counted(open_world: OpenWorld) -> None:
    world = await open_world("<tool_call>oops</tool_call><|im_end|>")
    choice = (await (await world.start()).ask(tools=TOOLS)).choices[0]
    assert choice.message.content == "<tool_call>oops</tool_call>"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert world.gateway.stats().malformed_tool_calls == 1


async def test_several_answers(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "b<|im_end|>")
    reply = await agent.ask(n=2, seed=7)
    assert sorted(choice.message.content for choice in reply.choices) == ["a", "b"]
    assert [request.sampling.seed for request in agent.world.engine.requests] == [7, 8]
    assert [one.id for one in agent.turns[0].completions] == [f"{reply.id}-0", f"{reply.id}-1"]
    assert (await agent.reward(reward=1, interaction_id=f"{reply.id}-1"))[0] == 200
    assert (await agent.reward(reward=1, interaction_id=reply.id))[0] == 400


async def test_parameters_of_the_request_and_of_the_session_reach_the_engine(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", "a<|im_end|>")
    agent = await world.start(sampling={"temperature": 0.1, "max_tokens": 5, "top_p": 0.2, "top_k": 3})
    await agent.ask(temperature=0.5, top_p=0.9, max_completion_tokens=9, seed=-1, extra_body={"top_k": 4})
    sampling = world.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 4, 9)
    assert sampling.seed == 2**63 - 1
    assert sampling.stop_token_ids == world.renderer.stop_token_ids
    assert agent.turns[0].completions[0].distribution is Distribution.ALTERED
    assert world.gateway.stats().altered_completions == 1
    await agent.ask()
    sampling = world.engine.requests[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.1, 0.2, 3, 5)


async def test_max_tokens_is_cut_to_the_room(open_agent: OpenAgent) -> None:
    agent = await open_agent("a" * 500, max_context_tokens=100)
    reply = await agent.ask(max_tokens=400)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == 100
    assert agent.world.engine.requests[0].sampling.temperature == 1.0
    assert agent.turns[0].completions[0].finish_reason is FinishReason.LENGTH


async def test_a_context_without_room_is_openais_error(open_world: OpenWorld) -> None:
    world = await open_world(max_context_tokens=20)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 20 tokens") as caught:
        await (await world.start()).ask("long " * 30)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


async def test_text_parts_and_developers(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "b<|im_end|>")
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    await agent.ask([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    await agent.ask([{"role": "system", "content": "x"}, {"role": "user", "content": "hello\nworld"}])
    assert agent.world.engine.requests[0].input_ids == agent.world.engine.requests[1].input_ids
    assert agent.turns[1].fork_reason is ForkReason.REPEATED
    assert agent.world.gateway.stats().forks == {ForkReason.REPEATED: 1}


async def test_the_default_model_and_the_path_without_version(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    body = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
    assert (await agent.world.call("/chat/completions", body, key=agent.key))[0] == 200


async def test_derived_seeds_depend_on_the_place_alone(open_world: OpenWorld) -> None:
    world = await open_world(*["a<|im_end|>"] * 5)
    one, same, other = [await world.start(seed=seed) for seed in (5, 5, 6)]
    await one.ask("x")
    await one.ask("x")
    await same.ask("something else before")
    await same.ask("x")
    await other.ask("x")
    first, repeated, _, again, of_other = [request.sampling.seed for request in world.engine.requests]
    assert again == first
    assert len({first, repeated, of_other}) == 3


async def test_the_journal_has_the_turn(open_agent: OpenAgent) -> None:
    agent = await open_agent("hello<|im_end|>")
    reply = await agent.ask("hi")
    (turn,) = agent.turns
    (completion,) = turn.completions
    assert turn.new_prompt_ids == agent.world.engine.requests[0].input_ids
    assert (turn.parent, turn.fork_at, turn.fork_reason) == (None, 0, None)
    assert turn.request_delta == ({"role": "user", "content": "hi"},)
    assert completion.id == reply.id
    assert completion.token_ids == tuple(agent.world.ids("hello<|im_end|>"))
    assert completion.logprobs == tuple(
        fake_logprob(token_id, position) for position, token_id in enumerate(completion.token_ids)
    )
    assert completion.distribution is Distribution.EXACT


async def test_an_interrupted_answer_has_its_versions(open_agent: OpenAgent) -> None:
    agent = await open_agent("abcd", is_stepped=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(agent.ask(max_tokens=4))
        await agent.world.engine.wait_for_requests(1)
        agent.world.engine.step(2)
        await agent.world.engine.pause(PauseMode.RETRACT)
        await agent.world.engine.update_weights(DiskWeights(path="new"), WeightVersion(step=1))
        await agent.world.engine.resume()
        agent.world.engine.step(2)
    assert agent.turns[0].completions[0].version_steps() == (0, 0, 1, 1)


async def test_broken_text_is_no_error(open_agent: OpenAgent) -> None:
    agent = await open_agent(script=[[200, 0, 250, 1], [5, 1]])
    reply = (await agent.ask("x")).choices[0].message
    await agent.ask([{"role": "user", "content": "x"}, reply, {"role": "user", "content": "y"}])
    assert agent.turns[1].parent == agent.turns[0].completions[0].id
