"""`/v1/messages`, Anthropic's protocol:

- an answer's thinking, text and calls are blocks, and the blocks of a stream are those of the whole answer
- an agent that sends the blocks back, with or without the thinking, continues the turn; so do moved `cache_control`s
  and a changed billing header
- results of tools become messages in their order; an error is recorded and not told to the template
- tools, stop sequences, thinking, forms of output, a prefilled answer and sampling are honoured; what is not supported
  is refused by its own name
- what Claude Code sends by habit is accepted
- `count_tokens` returns the length that the prompt would have, and records nothing
- errors have Anthropic's form, also of unknown paths and in streams
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from areal_agent.engine.fake import FakeEngine
from areal_agent.errors import EngineUnreachable, RequestError
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.conversation import Translated
from areal_agent.gateway.messages import MessagesRequest
from areal_agent.tokens.forest import Forest
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import GenerateRequest, GenerateResult

from .conftest import ADMIN_KEY, QUESTION, TEMPLATE, Agent, OpenAgent, OpenWorld, new_renderer

SCHEMA = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
TOOL: dict[str, Any] = {"name": "f", "description": "Does f.", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
END = "<|im_end|>"

# ------------------------------------------------------------------------------------------------------- helpers


async def ask(agent: Agent, **body: Any) -> Any:
    status, answer = await agent.world.call("/v1/messages", filled(body), key=agent.key)
    assert status == 200, answer
    return answer


async def refusal(agent: Agent, **body: Any) -> tuple[int, dict[str, Any]]:
    status, answer = await agent.world.call("/v1/messages", filled(body), key=agent.key)
    assert answer.keys() == {"type", "error"}, answer
    return status, answer["error"]


def filled(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "model", "max_tokens": 200, "messages": QUESTION} | body


async def events(agent: Agent, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; each is named by its type."""
    headers = {"x-api-key": agent.key}
    content = filled(body) | {"stream": True}
    async with agent.world.http.post(agent.world.url + "/v1/messages", json=content, headers=headers) as reply:
        text = await reply.text()
    found = [event.split("\n") for event in text.split("\n\n") if event and not event.startswith(":")]
    objects = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [name.removeprefix("event: ") for name, _ in found] == [one["type"] for one in objects]
    return objects


async def streamed(agent: Agent, **body: Any) -> Any:
    """Put a stream together as Anthropic's clients do, and check the order of its events."""
    start, *middle, end = await events(agent, **body)
    assert (start["type"], end) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    texts: list[str] = []
    for event in middle:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert (index, texts) == (len(message["content"]), [])
                message["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind} as delta}:
                assert index == len(message["content"]) - 1
                block, name = message["content"][-1], kind.removesuffix("_delta")
                if kind == "input_json_delta":
                    texts.append(delta["partial_json"])
                else:
                    block[name] += delta[name]
            case {"type": "content_block_stop", "index": index}:
                assert index == len(message["content"]) - 1
                if texts:
                    message["content"][-1]["input"] = json.loads("".join(texts))
                    texts.clear()
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= delta
                message["usage"] |= usage
            case _:
                raise AssertionError(event)
    return message


Asks = Callable[..., Any]
EITHER_WAY = pytest.mark.parametrize("ask_it", [ask, streamed], ids=["whole", "streamed"])


def results(answer: Any, **more: Any) -> list[dict[str, Any]]:
    calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": call_id, "content": "42", **more} for call_id in calls]


def then(answer: Any, content: Any) -> list[Any]:
    """The answer sent back, and what the user says to it."""
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": content}]


class CachingEngine(FakeEngine):
    """Reads the first five tokens of every prompt from its cache."""

    async def generate(self, request: GenerateRequest, on_chunk: Any = None) -> GenerateResult:
        return replace(await super().generate(request, on_chunk), cached_tokens=5)


# ------------------------------------------------------------------------------------------------------- answers


@EITHER_WAY
async def test_an_answer(open_agent: OpenAgent, renderer: Renderer, ask_it: Asks) -> None:
    agent = await open_agent(engine=CachingEngine([renderer.ids_of(f"<think>\nhm\n</think>\n\nhello {CALL}{END}")]))
    answer = await ask_it(agent, tools=[TOOL])
    completion = agent.turns[0].completions[0]
    assert answer == {
        "id": completion.id,
        "type": "message",
        "role": "assistant",
        "model": "model",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": completion.id},
            {"type": "text", "text": "hello"},
            {"type": "tool_use", "id": answer["content"][2]["id"], "name": "f", "input": {"x": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(agent.turns[0].new_prompt_ids) - 5,
            "cache_read_input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(completion.token_ids),
            "output_tokens_details": {"thinking_tokens": len(agent.world.ids("<think>\nhm\n</think>"))},
        },
    }
    assert answer["id"].startswith("msg_")


@pytest.mark.parametrize(
    "text",
    [
        f"hello{END}",
        "cut off",
        END,
        f"<think>\nhm\n</think>\n\n{CALL}{CALL}{END}",
        f"one {CALL} two {CALL} three{END}",
        f'<tool_call>{{"name": "f", "arguments": {{"x": {10**30}, "y": [1.0, "é"]}}}}</tool_call>{END}',
        f"<tool_call>{{broken{END}",
        "<think>\nnever ends",
    ],
)
async def test_a_stream_is_the_whole_answer(open_agent: OpenAgent, text: str) -> None:
    agent = await open_agent(text, text)
    whole, pieces = await ask(agent, tools=[TOOL]), await streamed(agent, tools=[TOOL])
    for answer in (whole, pieces):
        for block in answer["content"]:
            block.pop("signature", None)
            block.pop("id", None)
        del answer["id"]
    assert pieces == whole


async def test_the_limit_ends_an_answer(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"hello{END}")
    assert (await ask(agent, max_tokens=1))["stop_reason"] == "max_tokens"


@EITHER_WAY
async def test_the_stop_sequence_is_named(open_agent: OpenAgent, ask_it: Asks) -> None:
    agent = await open_agent(f"one two{END}", f"one two{END}")
    answer = await ask_it(agent, stop_sequences=["three", " tw"])
    assert answer["content"] == [{"type": "text", "text": "one"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " tw")
    answer = await ask_it(agent, stop_sequences=["three"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


@EITHER_WAY
async def test_thinking_can_be_left_out(open_agent: OpenAgent, ask_it: Asks) -> None:
    agent = await open_agent(f"<think>\nhm\n</think>\n\nhello{END}", f"yes{END}")
    answer = await ask_it(agent, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.get("thinking", block.get("text")) for block in answer["content"]] == ["", "hello"]
    await ask_it(agent, messages=[*QUESTION, *then(answer, "y")])
    assert agent.turns[1].parent == answer["id"]


# ------------------------------------------------------------------------------------------------- conversations

EPISODE = [f"<think>\nhm\n</think>\n\nhello {CALL}{END}", f"{CALL}{CALL}{END}", f"done{END}"]


@EITHER_WAY
async def test_an_answer_without_its_thinking_is_continued(open_agent: OpenAgent, ask_it: Asks) -> None:
    agent = await open_agent(*EPISODE)
    answer = await ask_it(agent, tools=[TOOL])
    del answer["content"][0]
    await ask_it(agent, messages=[*QUESTION, *then(answer, results(answer))], tools=[TOOL])
    assert agent.turns[1].parent == answer["id"]


async def test_what_is_not_for_the_model_may_change(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"a{END}", f"b{END}")
    question = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
    headers = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"} for number in range(2)]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    answer = await ask(agent, messages=[question], system=[headers[0], *system])
    await ask(agent, messages=[*QUESTION, *then(answer, "y")], system=[headers[1], *system])
    assert agent.turns[1].parent == answer["id"]
    assert agent.prompt().startswith("<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n")


async def test_blocks_of_a_user_become_messages_in_order(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"{CALL}{END}", f"b{END}")
    answer = await ask(agent, tools=[TOOL])
    texts = [{"type": "text", "text": text} for text in ("and", "now?")]
    more = then(answer, [*results(answer, is_error=True), *texts])
    more += [{"role": "user", "content": "?"}, {"role": "system", "content": [{"type": "text", "text": "Hurry."}]}]
    await ask(agent, messages=[*QUESTION, *more], tools=[TOOL])
    assert agent.turns[1].parent == answer["id"]
    assert agent.turns[1].request_delta == (
        {"role": "tool", "tool_call_id": answer["content"][0]["id"], "content": "42", "is_error": True},
        {"role": "user", "content": "and\nnow?"},
        {"role": "user", "content": "?"},
        {"role": "system", "content": "Hurry."},
    )
    said = ["tool\n42", "user\nand\nnow?", "user\n?", "system\nHurry.", "assistant\n"]
    assert agent.prompt().endswith("<|im_end|>\n".join(f"<|im_start|>{text}" for text in said))


@EITHER_WAY
async def test_the_last_answer_is_continued(open_agent: OpenAgent, ask_it: Asks) -> None:
    agent = await open_agent(f"world{END}", f"ok{END}")
    answer = await ask_it(agent, messages=[*QUESTION, {"role": "assistant", "content": "hello "}])
    assert answer["content"] == [{"type": "text", "text": "world"}]
    await ask_it(agent, messages=[*QUESTION, *then({"content": "hello world"}, "y")])
    assert agent.turns[1].parent == answer["id"]


@pytest.mark.parametrize(("one_by_one", "translated"), [(True, [0, 1, 2, 1, 2, 3]), (False, [0, 1, 2, 0, 1, 2, 3])])
def test_only_new_items_are_translated(one_by_one: bool, translated: list[int]) -> None:
    indexes: list[int] = []

    def translate(items: list[Any], first: int) -> list[Any]:
        indexes.extend(range(first, first + len(items)))
        return items

    memory = Translated()
    for items in ([{"a": 1}, {"b": 1}, {"c": 1}], [{"a": 1}, {"b": True}, {"c": 1}, {"d": 1}]):
        for _ in range(2):
            assert memory.messages(items, translate, one_by_one=one_by_one) == items
    assert indexes == translated


# ---------------------------------------------------------------------------------------------------- parameters


async def test_sampling(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"a{END}", f"a{END}")
    await ask(agent, temperature=0.5, top_p=0.9, top_k=7)
    sampling = agent.world.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 200)
    await ask(agent, top_k=0)
    assert agent.world.engine.requests[1].sampling.top_k == -1


async def test_a_choice_of_tools(open_agent: OpenAgent) -> None:
    agent = await open_agent(*[f"a{END}"] * 3)
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}):
        await ask(agent, tools=[TOOL], tool_choice=choice)
    openings = [agent.prompt(index).rpartition("assistant\n")[2] for index in range(3)]
    assert openings == ["", "<tool_call>", '<tool_call>{"name": "f", "arguments":']


@EITHER_WAY
async def test_no_calls_or_one(open_agent: OpenAgent, ask_it: Asks) -> None:
    agent = await open_agent(*[f"{CALL}{CALL}{END}"] * 3)
    kinds = [
        [block["type"] for block in (await ask_it(agent, tools=[TOOL], tool_choice=choice))["content"]]
        for choice in (None, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"})
    ]
    assert kinds == [["tool_use", "tool_use"], ["tool_use"], ["text"]]


async def test_a_strict_tool(open_agent: OpenAgent) -> None:
    agent = await open_agent(*[f'<tool_call>{{"name": "f", "arguments": {{"x": "1"}}}}</tool_call>{END}'] * 2)
    strict = TOOL | {"strict": True}
    assert [(await ask(agent, tools=[tool]))["stop_reason"] for tool in (TOOL, strict)] == ["tool_use", "end_turn"]


async def test_options_of_the_template(open_agent: OpenAgent, backend: Tokenizer) -> None:
    reads = "{{- enable_thinking is defined and enable_thinking }} {{ reasoning_effort or '' }}" + TEMPLATE
    agent = await open_agent(*[f"a{END}"] * 3, model=new_renderer(backend, reads))
    await ask(agent, thinking={"type": "enabled", "budget_tokens": 1024})
    await ask(agent, thinking={"type": "adaptive"}, output_config={"effort": "low"})
    await ask(agent, thinking={"type": "disabled"})
    assert [agent.prompt(i).partition("<")[0] for i in range(3)] == ["True ", "True low", "False "]


@pytest.mark.parametrize("param", ["output_config.format", "output_format"])
async def test_a_form_of_the_output(open_world: OpenWorld, param: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    body: dict[str, Any] = {"output_config": {"format": wanted}} if "." in param else {param: wanted}
    agent = await (await open_world(f'{{"x": 1}}{END}', has_grammar=True)).start()
    assert (await ask(agent, **body))["content"] == [{"type": "text", "text": '{"x": 1}'}]
    assert json.loads(agent.world.engine.requests[0].sampling.json_schema or "") == SCHEMA
    assert (await refusal(agent, tools=[TOOL], **body))[1]["param"] == param
    assert (await refusal(await (await open_world()).start(), **body))[1]["param"] == param


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": 2**31}, "top_k"),
    ({"betas": []}, "betas"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"service_tier": "batch"}, "service_tier"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]}, "tools[0]"),
    ({"tools": [TOOL, {"name": "g"}]}, "tools[1].input_schema"),
    ({"tools": [{"name": "g", "strict": True, "input_schema": {"type": 7}}]}, "tools[0].input_schema"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"messages": []}, "messages"),
    ({"messages": [*QUESTION, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
     "messages[1].content[0].input"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "<think>"}]}, "messages[-1]"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages[-1]"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "a"}], "tools": [TOOL], "tool_choice": {"type": "any"}},
     "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_is_refused_is_named(open_agent: OpenAgent, body: dict[str, Any], param: str) -> None:
    status, error = await refusal(await open_agent(), **body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just({"a": 1.5}) | st.just([{}])
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result"])},
    optional={
        "content": VALUES | st.just([{"type": "text", "text": "a"}]),
        "input": VALUES,
        **dict.fromkeys(["text", "thinking", "id", "name", "tool_use_id"], st.text(max_size=3) | VALUES),
    },
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(BLOCKS, max_size=3) | VALUES}
)


@given(messages=st.lists(MESSAGES, max_size=3))
def test_any_blocks_are_read_or_refused(renderer: Renderer, messages: list[Any]) -> None:
    with contextlib.suppress(RequestError):
        (question,) = MessagesRequest.read(filled({"messages": messages})).order().questions
        assert question.place(Forest(renderer), renderer).new_ids


async def test_what_claude_code_sends(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"a{END}")
    answer = await ask(
        agent,
        metadata={"user_id": '{"session_id":"1"}'},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        service_tier="auto",
        tools=[TOOL | {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True},
               TOOL | {"name": "later", "description": None, "defer_loading": True, "input_examples": [{"x": 1}]}],
        messages=[*QUESTION, {"role": "system", "content": "Hurry.", "output_config": {"effort": "high"}}],
    )  # fmt: skip
    assert answer["stop_reason"] == "end_turn"
    assert '{"type": "function", "function": {"name": "later", "parameters": {' in agent.prompt()


# ----------------------------------------------------------------------------------------------- around messages


@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/messages", "/v1/messages/"])
async def test_paths_and_keys(open_agent: OpenAgent, path: str) -> None:
    agent = await open_agent(f"a{END}")
    headers = {"x-api-key": agent.key, "anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
    async with agent.world.http.post(agent.world.url + path, json=filled({}), headers=headers) as reply:
        assert (await reply.json())["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize("last", [[], [{"role": "assistant", "content": "hello "}]], ids=["asked", "begun"])
async def test_counting_tokens(open_agent: OpenAgent, last: list[Any]) -> None:
    agent = await open_agent(f"a{END}")
    body = {"model": "model", "messages": QUESTION + last, "system": "Be brief.", "tools": [TOOL]}
    for_the_answer = {"max_tokens": 9, "temperature": 0.5, "stream": True, "stop_sequences": ["x"], "metadata": {}}
    counted = body | for_the_answer
    status, count = await agent.world.call("/v1/messages/count_tokens", counted, key=agent.key)
    assert (status, agent.turns) == (200, [])
    answer = await ask(agent, **body)
    assert count == {"input_tokens": answer["usage"]["input_tokens"]}
    assert agent.turns[0].fork_reason is None


@pytest.mark.parametrize("path", ["/v1/messages", "/messages/count_tokens", "/v1/messages/batches"])
async def test_errors_before_a_call(open_world: OpenWorld, path: str) -> None:
    world = await open_world()
    for key, kind in ((None, "authentication_error"), (ADMIN_KEY, "permission_error")):
        _, answer = await world.call(path, {}, key=key)
        assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error" if "batches" in path else kind)


async def test_errors_have_anthropics_types(open_world: OpenWorld) -> None:
    failures = [EngineUnreachable("gone"), RuntimeError("a bug")]
    agent = await (await open_world(script=failures, limits=Limits(max_body_bytes=999))).start()
    bodies: list[dict[str, Any]] = [{"model": "other"}, {}, {}, {"system": "x" * 999}]
    types = [(await refusal(agent, **body))[1]["type"] for body in bodies]
    assert types == ["not_found_error", "overloaded_error", "api_error", "request_too_large"]


async def test_a_full_context_is_told_as_anthropic_does(open_agent: OpenAgent) -> None:
    agent = await open_agent(max_context_tokens=20)
    status, error = await refusal(agent, messages=[{"role": "user", "content": "long " * 30}])
    assert status == 400
    assert error["message"].startswith("prompt is too long: ")


async def test_a_failure_in_a_stream_is_an_event(open_agent: OpenAgent) -> None:
    agent = await open_agent("abcdef", is_stepped=True)
    asking = await agent.under_way(events(agent), 1)
    await agent.end()
    *_, last = await asking
    assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
