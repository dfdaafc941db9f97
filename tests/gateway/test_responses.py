"""`/v1/responses`, by the official client and over plain HTTP:

- reasoning, text, and parallel calls of functions and custom tools, echoed whole or streamed, are one chain; its prompt
  ids are those of the same conversation in chat completions, also where only the encrypted reasoning comes back
- items join into messages in the order reasoning, text, calls; what adds nothing is ignored
- a stream has the documented events in their order, numbered; its pieces add up to the whole answer; one that waits
  says that it is in progress
- an answer that is cut off is incomplete; a failure in the middle of a stream is an event, and the response has failed
- `previous_response_id` continues the conversation, without the earlier instructions; items can be named by their id
- a stored response can be fetched by its own session, until the session ends
- a response in the background is polled, fetched (which delivers it) and cancelled; a stream can be cancelled, too
- a reward may name an item; forced and allowed tools, namespaces, structured text, log-probabilities, token ids
- parameters and items that are not supported are refused by name
"""

import json
from typing import Any

import openai
import pytest

from areal_agent.errors import EngineUnreachable, RequestError
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.responses import ResponsesRequest, messages_of
from areal_agent.types import Distribution, FinishReason

from .conftest import Agent, OpenAgent, OpenWorld

TOOLS: list[Any] = [
    {"type": "function", "name": "python", "description": "Run.", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "shell", "description": "Type."},
]
SHELL_INPUT = {"properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}
CHAT_FUNCTIONS: list[Any] = [
    {"name": "python", "description": "Run.", "parameters": {"type": "object"}, "strict": False},
    {"name": "shell", "description": "Type.", "parameters": {"type": "object", **SHELL_INPUT}, "strict": True},
]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": function} for function in CHAT_FUNCTIONS]
CALLS = (
    '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    '<tool_call>{"name": "shell", "arguments": {"input": "ls"}}</tool_call>'
)
ANSWERS = (f"<think>\nwell\n</think>\n\nlet me see {CALLS}<|im_end|>", f"{CALLS}<|im_end|>", "hello world<|im_end|>")


async def say(agent: Agent, items: Any = "hello", *, is_streamed: bool = False, **options: Any) -> Any:
    if not is_streamed:
        return await agent.client.responses.create(model="model", input=items, **options)
    async with agent.client.responses.stream(model="model", input=items, **options) as stream:
        return await stream.get_final_response()


async def post(agent: Agent, path: str = "", **body: Any) -> tuple[int, Any]:
    default = {} if path else {"model": "model", "input": "hello"}
    return await agent.world.call(f"/v1/responses{path}", default | body, key=agent.key)


async def play(agent: Agent, *, is_streamed: bool = False, **options: Any) -> list[Any]:
    """Play the three answers; return the items of the whole conversation."""
    items: list[Any] = [{"role": "user", "content": "2+2?"}]
    for _ in ANSWERS:
        reply = await say(agent, items, is_streamed=is_streamed, tools=TOOLS, instructions="be kind", **options)
        items += [item.to_dict() for item in reply.output]
        for item in reply.output:
            if item.type in ("function_call", "custom_tool_call"):
                items.append({"type": f"{item.type}_output", "call_id": item.call_id, "output": "4"})
    return items


async def play_in_chat(agent: Agent) -> None:
    messages: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2?"}]
    for _ in ANSWERS:
        message = (await agent.ask(messages, tools=CHAT_TOOLS)).choices[0].message
        messages.append(message.to_dict())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls or ()]


def ids(agent: Agent) -> list[tuple[Any, Any]]:
    """What the record has of each turn: new prompt ids and sampled ids."""
    return [(turn.new_prompt_ids, turn.completions[0].token_ids) for turn in agent.turns]


# ------------------------------------------------------------------------------------------------ conversations


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_it_is_recorded_as_in_chat(open_world: OpenWorld, is_streamed: bool) -> None:
    world = await open_world(*ANSWERS, *ANSWERS)
    agent, chatting = await world.start(), await world.start()
    items = await play(agent, is_streamed=is_streamed)
    await play_in_chat(chatting)
    assert ids(agent) == ids(chatting)
    assert [turn.parent for turn in agent.turns] == [None, *(turn.completions[0].id for turn in agent.turns[:-1])]
    kinds = ["function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output"]
    assert [item.get("type") for item in items] == [None, "reasoning", "message", *kinds, *kinds, "message"]


async def test_encrypted_reasoning_alone_continues_the_chain(open_agent: OpenAgent) -> None:
    agent = await open_agent("<think>\nwell\n</think>\n\nyes<|im_end|>", "no<|im_end|>")
    first = await say(agent, include=["reasoning.encrypted_content"], store=False)
    reasoning = first.output[0].to_dict() | {"content": None}
    await say(
        agent, [{"role": "user", "content": "hello"}, reasoning, first.output[1], {"role": "user", "content": "?"}]
    )
    assert agent.turns[1].parent == first.id
    assert agent.turns[1].request_delta[0]["role"] == "user"


def no_items(item_id: str, param: str) -> dict[str, Any]:
    raise AssertionError(f"{param} refers to {item_id}")


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(id_: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": id_,
        "name": "f",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }


def called(*ids: str, **others: Any) -> dict[str, Any]:
    calls = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in ids]
    return {"role": "assistant", **others, "tool_calls": calls}


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAAA"}
TEXT = {
    "type": "message",
    "role": "assistant",
    "phase": "final_answer",
    "content": [
        {"type": "output_text", "text": "t", "annotations": [{}], "logprobs": []},
        {"type": "refusal", "refusal": "u"},
    ],
}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "4"}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "4"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([REASONING, TEXT, call("a"), call("b")], [called("a", "b", reasoning_content="r", content="tu")]),
        ([TEXT, REASONING], [message("assistant", "tu"), {"role": "assistant", "reasoning_content": "r"}]),
        ([call("a"), OUTPUT, call("b")], [called("a"), RESULT, called("b")]),
        ([call("a"), TEXT, TEXT], [called("a"), message("assistant", "tu"), message("assistant", "tu")]),
        ([SUMMARY, call("a")], [called("a", reasoning_content="s")]),
        ([message("developer", "d"), message("user", "u")], [message("developer", "d"), message("user", "u")]),
    ],
    ids=["one", "reasoning-begins", "outputs-end", "text-begins", "summary", "roles"],
)
def test_items_join_into_messages(items: list[Any], messages: list[Any]) -> None:
    assert messages_of(items, 0, no_items) == messages


async def test_a_call_may_join_what_came_before(open_agent: OpenAgent) -> None:
    """The items of one message come in two requests."""
    agent = await open_agent("a<|im_end|>", "b<|im_end|>")
    items: list[Any] = [message("user", "x"), TEXT]
    await say(agent, items)
    await say(agent, [*items, call("a"), OUTPUT])
    assert [one["role"] for one in agent.turns[1].request_delta] == ["user", "assistant", "tool"]


# ------------------------------------------------------------------------------------------------------ streams


async def events(agent: Agent, **options: Any) -> list[Any]:
    stream = await agent.client.responses.create(model="model", input="hello", stream=True, **options)
    return [event async for event in stream]


async def test_a_stream_has_the_documented_events(open_agent: OpenAgent) -> None:
    agent = await open_agent(ANSWERS[0])
    told = await events(agent, tools=TOOLS)
    assert [event.sequence_number for event in told] == list(range(len(told)))
    kinds = [event.type.removeprefix("response.") for event in told]
    assert [kind for number, kind in enumerate(kinds) if kind != kinds[number - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    items = [event.item for event in told if event.type == "response.output_item.done"]
    assert items == told[-1].response.output
    for index, item in enumerate(items):
        pieces = [event.delta for event in told if event.type.endswith(".delta") and event.output_index == index]
        text = item.content[0].text if hasattr(item, "content") else getattr(item, "arguments", None) or item.input
        assert "".join(pieces) == text


async def test_text_leaves_as_it_is_sampled(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>", is_stepped=True)
    asking = await agent.under_way(
        agent.client.responses.create(
            model="model", input="x", stream=True, include=["message.output_text.logprobs"], top_logprobs=1
        ),
        1,
    )
    stream = aiter(await asking)
    for letter in "abc":
        while (event := await anext(stream)).type != "response.output_text.delta":
            pass
        assert (event.delta, [one.token for one in event.logprobs]) == (letter, [letter])
        agent.world.engine.step(1)
    done = await anext(stream)
    assert [one.token for one in done.logprobs] == ["a", "b", "c"]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_is_cut_off(open_agent: OpenAgent, is_streamed: bool) -> None:
    agent = await open_agent("abcdef")
    if is_streamed:
        last = (await events(agent, max_output_tokens=2))[-1]
        assert last.type == "response.incomplete"
        reply = last.response
    else:
        reply = await say(agent, max_output_tokens=2)
    assert (reply.status, reply.incomplete_details.reason, reply.output_text) == (
        "incomplete",
        "max_output_tokens",
        "ab",
    )
    assert (reply.usage.output_tokens, reply.output[0].status) == (2, "incomplete")


async def test_a_stream_that_waits_is_in_progress(open_agent: OpenAgent) -> None:
    agent = await open_agent("ab<|im_end|>", is_stepped=True, limits=Limits(keep_alive_s=0.05))
    kinds: list[str] = []
    async with agent.client.responses.stream(model="model", input="x") as stream:
        async for event in stream:
            assert event.sequence_number == len(kinds)
            kinds.append(event.type)
            if kinds.count("response.in_progress") > 3:
                agent.world.engine.step(1)
        assert (await stream.get_final_response()).output_text == "ab"


async def test_a_reward_may_name_an_item(open_agent: OpenAgent) -> None:
    agent = await open_agent(*ANSWERS)
    reply = await say(agent, tools=TOOLS)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    for number, item in enumerate(reply.output):
        assert (await agent.reward(reward=number, interaction_id=item.id))[0] == 200
    assert (await agent.reward(reward=1, interaction_id="msg_" + "0" * 24))[0] == 400
    await agent.end()
    assert agent.world.journal.closed[agent.id].rewards.by_completion == {reply.id: 3.0}


async def test_a_failure_in_the_middle_of_a_stream(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>")
    agent.world.engine.die_after(2)
    *_, last = await events(agent)
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert (await agent.client.responses.retrieve(last.response.id)).status == "failed"


# ----------------------------------------------------------------------------------------------- kept responses


async def test_the_previous_response_is_continued(open_agent: OpenAgent) -> None:
    agent = await open_agent(*ANSWERS)
    first = await say(agent, tools=TOOLS)
    outputs = [{"type": f"{one.type}_output", "call_id": one.call_id, "output": "4"} for one in first.output[2:]]
    second = await say(agent, outputs, tools=TOOLS, previous_response_id=first.id, is_streamed=True)
    outputs = [{"type": f"{one.type}_output", "call_id": one.call_id, "output": "4"} for one in second.output]
    third = await say(agent, outputs, tools=TOOLS, previous_response_id=second.id)
    assert third.previous_response_id == second.id
    assert [turn.parent for turn in agent.turns] == [None, first.id, second.id]


async def test_earlier_instructions_are_not_carried_over(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    first = await say(agent, instructions="be kind")
    second = await say(agent, "and?", instructions="be kind", previous_response_id=first.id)
    await say(agent, "so?", previous_response_id=second.id)
    assert agent.turns[1].parent == first.id
    assert [one["content"] for one in agent.turns[2].request_delta] == ["hello", "a", "and?", "b", "so?"]


async def test_items_are_named_by_their_id(open_agent: OpenAgent) -> None:
    agent = await open_agent("<think>\nwell\n</think>\n\na<|im_end|>", "b<|im_end|>")
    first = await say(agent)
    items = [{"type": "item_reference", "id": item.id} for item in first.output]
    await say(agent, [message("user", "hello"), *items, message("user", "and?")])
    assert agent.turns[1].parent == first.id
    status, answer = await post(agent, input=[{"type": "item_reference", "id": f"{first.output[0].id}0"}])
    assert (status, answer["error"]["param"]) == (404, "input[0].id")


async def test_a_response_is_kept_until_the_session_ends(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", "b<|im_end|>")
    agent, other = await world.start(), await world.start()
    reply = await say(agent, metadata={"a": "b"})
    responses = agent.client.responses
    assert await responses.retrieve(reply.id, include=["reasoning.encrypted_content"]) == reply
    with pytest.raises(openai.NotFoundError):
        await other.client.responses.retrieve(reply.id)
    forgotten = await say(agent, store=False)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(forgotten.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await say(agent, previous_response_id=forgotten.id)
    assert caught.value.param == "previous_response_id"
    await agent.end()
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(reply.id)


async def in_the_background(agent: Agent, num_tokens: int = 1) -> Any:
    reply = await say(agent, background=True)
    await agent.world.engine.wait_for_requests(1)
    agent.world.engine.step(num_tokens)
    return reply


async def fetched(agent: Agent, id_: str) -> Any:
    """Poll until the response has ended."""
    while (reply := await agent.client.responses.retrieve(id_)).status == "in_progress":
        pass
    return reply


async def test_a_response_in_the_background(open_agent: OpenAgent) -> None:
    agent = await open_agent("ab<|im_end|>", is_stepped=True)
    begun = await in_the_background(agent)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert (await agent.client.responses.retrieve(begun.id)).status == "in_progress"
    agent.world.engine.step(2)
    assert (await fetched(agent, begun.id)).output_text == "ab"
    with pytest.raises(openai.BadRequestError, match="is completed"):
        await agent.client.responses.cancel(begun.id)
    await agent.end()
    assert agent.world.journal.closed[agent.id].undelivered == ()


async def test_a_response_that_nobody_fetched_is_undelivered(open_agent: OpenAgent) -> None:
    agent = await open_agent("ab<|im_end|>")
    begun = await say(agent, background=True)
    while not agent.turns:
        await agent.reward(reward=1)
    await agent.end()
    assert agent.world.journal.closed[agent.id].undelivered == (begun.id,)


async def test_cancelling_in_the_background(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>", is_stepped=True)
    begun = await in_the_background(agent, 2)
    for _ in range(2):
        assert (await agent.client.responses.cancel(begun.id)).status == "cancelled"
    assert (await agent.client.responses.retrieve(begun.id)).status == "cancelled"
    (completion,) = agent.turns[0].completions
    assert (completion.token_ids, completion.finish_reason) == (tuple(agent.world.ids("ab")), FinishReason.ABORT)


async def test_cancelling_a_stream(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>", is_stepped=True)
    asking = agent.client.responses.create(model="model", input="x", stream=True)
    stream = aiter(await (await agent.under_way(asking, 1)))
    begun = await anext(stream)
    assert (await agent.client.responses.cancel(begun.response.id)).status == "cancelled"
    *_, last = [event async for event in stream]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    assert agent.world.gateway.stats().errors == {409: 1}
    assert agent.turns[0].completions[0].finish_reason is FinishReason.ABORT


async def test_a_failure_in_the_background(open_agent: OpenAgent) -> None:
    agent = await open_agent(script=[EngineUnreachable("gone")])
    reply = await fetched(agent, (await say(agent, background=True)).id)
    assert (reply.status, reply.error.code) == ("failed", "server_error")


# --------------------------------------------------------------------------------------------- tools and options


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "shell"}, ["shell"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "python"}]}, ["python"]),
        ("none", []),
    ],
    ids=["custom", "allowed", "none"],
)
async def test_tool_choices(open_agent: OpenAgent, choice: Any, names: list[str]) -> None:
    forced = '{"input": "ls"}}</tool_call><|im_end|>'
    agent = await open_agent(forced if names == ["shell"] else f"{CALLS}<|im_end|>")
    reply = await say(agent, tools=TOOLS, tool_choice=choice)
    assert [item.name for item in reply.output if item.type != "message"] == names
    assert reply.tool_choice == choice or reply.tool_choice.to_dict() == choice


async def test_a_function_and_a_custom_tool_of_one_name(open_agent: OpenAgent) -> None:
    agent = await open_agent('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>')
    function = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}
    reply = await say(agent, tools=[{"type": "custom", "name": "f"}, function])
    assert [item.type for item in reply.output] == ["function_call"]


async def test_a_single_call(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"{CALLS}<|im_end|>")
    reply = await say(agent, tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in reply.output] == ["function_call"]


async def test_tools_in_a_namespace(open_agent: OpenAgent) -> None:
    agent = await open_agent(
        '<tool_call>{"name": "files.read", "arguments": {}}</tool_call><|im_end|>', "done<|im_end|>"
    )
    tools = [
        {"type": "namespace", "name": "files", "description": "d", "tools": [{"type": "function", "name": "read"}]}
    ]
    status, reply = await post(agent, tools=tools)
    item = reply["output"][0]
    assert (status, item["namespace"], item["name"]) == (200, "files", "read")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
    await post(agent, input=[message("user", "hello"), item, output], tools=tools)
    assert agent.turns[1].parent == reply["id"]


async def test_structured_text(open_agent: OpenAgent) -> None:
    agent = await open_agent('{"a": 1}<|im_end|>', has_grammar=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    reply = await say(agent, text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    assert json.loads(reply.output_text) == {"a": 1}
    assert json.loads(agent.world.engine.requests[0].sampling.json_schema or "") == schema
    assert agent.turns[0].completions[0].distribution is Distribution.ALTERED


async def test_logprobs_are_those_of_the_text(open_agent: OpenAgent) -> None:
    agent = await open_agent("<think>\nyes\n</think>\n\nyes<|im_end|>")
    reply = await say(agent, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = reply.output[1].content[0].logprobs
    assert "".join(one.token for one in logprobs) == "yes"
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"type": 5}}]},
            "tools[0].parameters",
        ),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),  # as in a chat
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 5}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"background": True, "stream": True}, "background"),
        ({"n": 2}, "n"),
    ],
)
def test_parameters_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ResponsesRequest.read({"model": "model", "input": "hello"} | body)
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[1]"),
        ({"type": "computer_call_output"}, "input[1].type"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id"),
        ({"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}, "input[1].arguments"),
        ({"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}, "input[1].arguments"),
        ({"type": "reasoning", "content": "x"}, "input[1].content"),
    ],
)
def test_items_are_refused_by_name(item: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages_of([message("user", "x"), item], 0, no_items)
    assert (caught.value.param, caught.value.status) == (param, 400)


async def test_parameters_that_are_accepted(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    ours: dict[str, Any] = {
        "return_token_ids": True,
        "seed": 5,
        "top_k": 7,
        "stop": "x",
        "reasoning": {"effort": "low"},
    }
    for_nothing: dict[str, Any] = {
        "client_metadata": {"x": "y"},
        "include": [],
        "max_tool_calls": None,
        "service_tier": "auto",
        "n": 1,
    }
    status, reply = await post(agent, **ours, **for_nothing, tools=[], truncation="disabled", user="u")
    assert (status, reply["status"], reply["reasoning"]) == (200, "completed", {"effort": "low"})
    assert reply["prompt_token_ids"] == list(agent.turns[0].new_prompt_ids)
    assert reply["token_ids"] == agent.world.ids("a<|im_end|>")
    assert (agent.turns[0].sampling.seed, agent.turns[0].sampling.top_k) == (5, 7)
