"""`/v1/completions`, by the official client:

- a prompt as text or as ids is a turn; its answer is plain text, whatever it looks like
- several prompts are several turns, answered in the order of the prompts
- a prompt that begins with a recorded prompt and its answer continues it, as text and as ids
- stop texts, echo, log-probabilities, ids and streams work; an unsupported parameter is a 400 that names it
"""

import asyncio
from typing import Any

import openai
import pytest

from areal_agent.errors import RequestError
from areal_agent.gateway.completions import CompletionsRequest

from .conftest import Agent, OpenAgent, OpenWorld

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


async def complete(agent: Agent, prompt: Any, **options: Any) -> Any:
    return await agent.client.completions.create(model="model", prompt=prompt, **options)


async def test_a_prompt_is_a_turn(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"so {CALL}<|im_end|>", "b<|im_end|>")
    reply = await complete(agent, "say hello")
    assert reply.choices[0].text == f"so {CALL}"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.id.startswith("cmpl-")
    assert reply.usage.prompt_tokens == len(agent.world.ids("say hello"))
    (turn,) = agent.turns
    assert turn.new_prompt_ids == tuple(agent.world.ids("say hello"))
    assert turn.request_delta == ()
    assert turn.completions[0].id == reply.id
    await complete(agent, agent.world.ids("say hello"))
    assert agent.world.engine.requests[1].input_ids == agent.world.engine.requests[0].input_ids


async def test_prompts_are_turns_of_their_own(open_agent: OpenAgent) -> None:
    def script(request: Any) -> list[int]:
        return agent.world.ids(agent.world.renderer.detokenizer.text_of(request.input_ids).upper() + "<|im_end|>")

    agent = await open_agent(script=script)
    reply = await complete(agent, ["a", "b"], n=2)
    assert [choice.text for choice in reply.choices] == ["A", "A", "B", "B"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    ids = sorted(completion.id for turn in agent.turns for completion in turn.completions)
    assert ids == [f"{reply.id}-{index}" for index in range(4)]
    assert reply.usage.completion_tokens == 4 * len(agent.world.ids("A<|im_end|>"))


@pytest.mark.parametrize("has_ids", [False, True])
async def test_a_longer_prompt_continues(open_agent: OpenAgent, has_ids: bool) -> None:
    agent = await open_agent(" world", "!<|im_end|>")
    first = await complete(agent, "hello", max_tokens=len(agent.world.ids(" world")))
    more = [*agent.world.ids("hello"), *agent.world.ids(" world"), *agent.world.ids("?")] if has_ids else "hello world?"
    await complete(agent, more)
    turn = agent.turns[1]
    assert turn.parent == first.id
    assert turn.new_prompt_ids == tuple(agent.world.ids("?"))


async def test_a_stop_text_and_an_echo(open_agent: OpenAgent) -> None:
    agent = await open_agent(" b\nc<|im_end|>")
    reply = await complete(agent, "a", stop="\n", echo=True)
    assert reply.choices[0].text == "a b"
    assert agent.turns[0].completions[0].token_ids == tuple(agent.world.ids(" b\n"))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_echo_alone_samples_nothing(open_agent: OpenAgent, is_streamed: bool) -> None:
    agent = await open_agent()
    reply = await complete(agent, ["a", agent.world.ids("bc")], max_tokens=0, echo=True, stream=is_streamed)
    texts, last = {0: "", 1: ""}, None
    for last in [chunk async for chunk in reply] if is_streamed else [reply]:
        for choice in last.choices:
            texts[choice.index] += choice.text
    assert (texts, last.choices[-1].finish_reason) == ({0: "a", 1: "bc"}, "length")
    assert (agent.turns, agent.world.engine.requests) == ([], [])


async def test_log_probabilities_are_columns(open_agent: OpenAgent) -> None:
    agent = await open_agent("xyz<|im_end|>")
    reply = await complete(agent, "a", logprobs=2, extra_body={"return_token_ids": True})
    choice = reply.choices[0]
    (completion,) = agent.turns[0].completions
    assert "".join(choice.logprobs.tokens) == "xyz"
    assert choice.logprobs.token_logprobs == list(completion.logprobs[:-1])
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2, 2, 2]
    assert tuple(choice.token_ids) == completion.token_ids
    assert tuple(choice.prompt_token_ids) == agent.turns[0].new_prompt_ids


async def test_a_stream(open_agent: OpenAgent) -> None:
    agent = await open_agent("xyz<|im_end|>", "uv<|im_end|>", is_stepped=True)
    asking = asyncio.create_task(
        complete(agent, ["a", "b"], stream=True, echo=True, stream_options={"include_usage": True})
    )
    await agent.world.engine.wait_for_requests(2)
    while agent.world.engine.step(1):
        pass
    *chunks, usage = [chunk async for chunk in await asking]
    texts, ends = ["", ""], ["", ""]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason or ""
    assert texts == ["axyz", "buv"]
    assert ends == ["stop", "stop"]
    assert len(chunks) > 4
    assert usage.usage.completion_tokens == len(agent.world.ids("xyz<|im_end|>uv<|im_end|>"))


MINIMAL: dict[str, Any] = {"model": "model", "prompt": "x"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"suffix": "y"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"stop": 1}, "stop"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        CompletionsRequest.read(MINIMAL | body)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_ids_outside_the_vocabulary_are_refused(open_world: OpenWorld) -> None:
    world = await open_world()
    with pytest.raises(openai.BadRequestError, match="token ids below") as caught:
        await complete(await world.start(), [5, 100_000])
    assert caught.value.param == "prompt"


async def test_a_prompt_without_room_is_openais_error(open_world: OpenWorld) -> None:
    world = await open_world(max_context_tokens=20)
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(await world.start(), "long " * 30)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
