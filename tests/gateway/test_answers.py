"""Answers that are not streamed:

- every sampling parameter reaches the engine, and each but temperature makes the recorded probability `altered`
- a stop text cuts the text, tokens, log-probabilities and spans, whatever the engine sampled beyond it
- a forced call begins in the prompt and ends the answer; if it is never completed, it is text and counted
- without parallel calls an answer ends with its first complete call; so it does with a named tool, the only one allowed
- `auto` without tools calls nothing
- reasoning is separate from the content, and counted; ids and log-probabilities come on request and equal the
  record's; bytes are exact
- JSON by a grammar if the engine has one, else a 400
- a full context gives an empty answer if the session asks for that; an engine may sample nothing at all
"""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from areal_agent.engine.fake import fake_logprob
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Distribution

from .conftest import QUESTION, OpenAgent, OpenWorld

PYTHON = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
SHELL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'


@pytest.mark.parametrize(
    ("param", "value", "sampled"),
    [
        ("top_p", 0.5, 0.5),
        ("top_k", 7, 7),
        ("min_p", 0.25, 0.25),
        ("frequency_penalty", -0.5, -0.5),
        ("presence_penalty", 1.5, 1.5),
        ("repetition_penalty", 1.25, 1.25),
        ("logit_bias", {"7": -100, "8": 2}, ((7, -100.0), (8, 2.0))),
    ],
)
async def test_sampling_parameters_reach_the_engine(
    open_world: OpenWorld, param: str, value: Any, sampled: object
) -> None:
    world = await open_world("a<|im_end|>", "a<|im_end|>")
    asking, default = await world.start(), await world.start(sampling={param: value})
    await asking.ask(extra_body={param: value})
    await default.ask()
    for agent, request in zip((asking, default), world.engine.requests, strict=True):
        assert getattr(request.sampling, param) == sampled
        assert agent.turns[0].completions[0].distribution is Distribution.ALTERED


async def test_a_stop_text_ends_the_answer(open_agent: OpenAgent) -> None:
    agent = await open_agent("one\nObs: two<|im_end|>", "so<|im_end|>")
    reply = await agent.ask(QUESTION, stop=["Obs:", "never"], logprobs=True)
    assert reply.choices[0].message.content == "one\n"
    assert reply.choices[0].finish_reason == "stop"
    (completion,) = agent.turns[0].completions
    assert completion.token_ids == tuple(agent.world.ids("one\nObs:"))
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.versions[-1].end == len(completion.token_ids)
    assert completion.distribution is Distribution.EXACT
    assert agent.turns[0].sampling.stop == ("Obs:", "never")
    assert bytes(byte for row in reply.choices[0].logprobs.content for byte in row.bytes) == b"one\n"
    assert reply.usage.completion_tokens == len(completion.token_ids)
    more = [*QUESTION, reply.choices[0].message, {"role": "user", "content": "y"}]
    await agent.ask(more)
    assert agent.turns[1].parent == completion.id
    end = tuple(agent.world.ids("<|im_end|>"))
    assert agent.turns[1].new_prompt_ids[: len(end)] == end  # the answer was cut before it ended itself


async def test_the_engine_stops_where_the_answer_does(open_agent: OpenAgent) -> None:
    agent = await open_agent("a.bcdefghijk<|im_end|>", is_stepped=True)
    call = await agent.under_way(agent.ask(stop="."), 2)
    assert (await call).choices[0].message.content == "a"
    assert agent.world.engine.aborted_ids == [agent.world.engine.requests[0].request_id]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "python"}}], ids=["required", "named"]
)
async def test_a_forced_call(open_agent: OpenAgent, renderer: Renderer, choice: Any) -> None:
    opening = renderer.answer_format.opening(None if choice == "required" else "python")
    assert CALL.startswith(opening)
    agent = await open_agent(CALL.removeprefix(opening) + "<|im_end|>", "so<|im_end|>")
    reply = await agent.ask(QUESTION, tools=[PYTHON, SHELL], tool_choice=choice)
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("python", {"code": "1"})
    assert reply.choices[0].finish_reason == "tool_calls"
    assert agent.turns[0].completions[0].distribution is Distribution.EXACT
    prompt = agent.world.renderer.detokenizer.text_of(agent.turns[0].new_prompt_ids)
    assert prompt.endswith(opening)
    more = [*QUESTION, reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
    await agent.ask(more, tools=[PYTHON, SHELL])
    assert agent.turns[1].parent == reply.id


async def test_a_forced_call_that_is_none_is_text(open_agent: OpenAgent) -> None:
    agent = await open_agent("oops<|im_end|>")
    reply = await agent.ask(tools=[PYTHON], tool_choice="required")
    assert reply.choices[0].message.content.endswith("oops")
    assert reply.choices[0].message.tool_calls is None
    assert agent.world.gateway.stats().malformed_tool_calls == 1


async def test_without_parallel_calls_the_first_ends_the_answer(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"hm {CALL}{CALL}<|im_end|>")
    choice = (await agent.ask(tools=[PYTHON], parallel_tool_calls=False)).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    assert agent.turns[0].completions[0].token_ids == tuple(agent.world.ids(f"hm {CALL}"))
    assert agent.world.gateway.stats().malformed_tool_calls == 0


async def test_a_malformed_call_is_no_single_call(open_agent: OpenAgent) -> None:
    bad = '<tool_call>{"name": "python", "arguments": {"x": 1}, oops</tool_call>'
    agent = await open_agent(f"{bad} hm {CALL}{CALL}<|im_end|>")
    choice = (await agent.ask(tools=[PYTHON], parallel_tool_calls=False)).choices[0]
    assert choice.message.content == f"{bad} hm"
    assert len(choice.message.tool_calls) == 1
    assert agent.turns[0].completions[0].token_ids == tuple(agent.world.ids(f"{bad} hm {CALL}"))


async def test_a_named_tool_is_called_once_and_no_other(open_agent: OpenAgent) -> None:
    shell = CALL.replace("python", "shell")
    agent = await open_agent(f"oops</tool_call>{shell}{CALL}{CALL}<|im_end|>")
    named = {"type": "function", "function": {"name": "python"}}
    choice = (await agent.ask(tools=[PYTHON, SHELL], tool_choice=named)).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["python"]
    assert choice.message.content.endswith(f"oops</tool_call>{shell}")
    assert agent.world.gateway.stats().malformed_tool_calls == 2


async def test_without_tools_nothing_is_called(open_world: OpenWorld) -> None:
    world = await open_world(f"{CALL}<|im_end|>")
    choice = (await (await world.start()).ask()).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


async def test_reasoning_comes_apart_and_is_counted(open_agent: OpenAgent) -> None:
    agent = await open_agent("<think>\nwell\n</think>\n\nhello<|im_end|>", "so<|im_end|>")
    reply = await agent.ask(QUESTION)
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("well", "hello")
    num_reasoning = reply.usage.completion_tokens_details.reasoning_tokens
    assert num_reasoning == len(agent.world.ids("<think>\nwell\n</think>"))
    await agent.ask([*QUESTION, message, {"role": "user", "content": "y"}])
    assert agent.turns[1].parent == reply.id


async def test_ids_and_log_probabilities_are_those_of_the_record(open_agent: OpenAgent) -> None:
    agent = await open_agent("aé<|im_end|>")
    reply = await agent.ask(logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    (turn,) = agent.turns
    (completion,) = turn.completions
    assert tuple(reply.prompt_token_ids) == turn.new_prompt_ids
    assert tuple(reply.choices[0].token_ids) == completion.token_ids
    rows = reply.choices[0].logprobs.content
    assert [row.logprob for row in rows] == [fake_logprob(id_, i) for i, id_ in enumerate(completion.token_ids[:-1])]
    assert [bytes(row.bytes) for row in rows] == [
        agent.world.renderer.detokenizer.bytes_of(i) for i in completion.token_ids[:-1]
    ]
    assert [len(row.top_logprobs) for row in rows] == [2] * len(rows)
    assert rows[0].top_logprobs[0].token == rows[0].token == "a"
    assert agent.world.engine.requests[0].num_top_logprobs == 2


class Sum(BaseModel):
    """The schema of the answer that the model must give."""

    total: int


async def test_a_grammar_where_the_engine_has_one(open_agent: OpenAgent) -> None:
    agent = await open_agent('{"total": 3}<|im_end|>', has_grammar=True)
    reply = await agent.client.chat.completions.parse(
        model="model", messages=[{"role": "user", "content": "1+2"}], response_format=Sum
    )
    assert reply.choices[0].message.parsed == Sum(total=3)
    schema = agent.world.engine.requests[0].sampling.json_schema
    assert schema is not None
    assert json.loads(schema)["required"] == ["total"]
    assert agent.turns[0].completions[0].distribution is Distribution.ALTERED


async def test_without_a_grammar_json_is_refused(open_world: OpenWorld) -> None:
    world = await open_world()
    with pytest.raises(openai.BadRequestError, match="constrain answers by a grammar") as caught:
        await (await world.start()).ask(response_format={"type": "json_object"})
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_parameter")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_context_without_room_may_be_a_clean_stop(open_world: OpenWorld, is_streamed: bool) -> None:
    world = await open_world(max_context_tokens=20)
    agent = await world.start(truncate=True)
    reply = await agent.ask("long " * 30, n=2, stream=is_streamed)
    choices = [chunk.choices[0] async for chunk in reply] if is_streamed else reply.choices
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length", "length"]
    if not is_streamed:
        assert [choice.message.content for choice in choices] == ["", ""]
        assert (await agent.reward(reward=1, interaction_id=f"{reply.id}-0"))[0] == 400
    assert agent.turns == []
    assert world.engine.requests == []


async def test_images_are_refused_clearly(open_world: OpenWorld) -> None:
    world = await open_world()
    parts = [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]
    with pytest.raises(openai.BadRequestError, match="no images") as caught:
        await (await world.start()).ask([{"role": "user", "content": parts}])
    assert caught.value.param == "messages[0].content[0]"


async def test_an_answer_without_a_token(open_agent: OpenAgent) -> None:
    agent = await open_agent(script=[[]])
    choice = (await agent.ask()).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    assert agent.turns[0].completions[0].token_ids == ()
