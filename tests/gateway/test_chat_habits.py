"""What clients of chat completions send by habit:

- `chat_template_kwargs`, `reasoning_effort` and `verbosity` reach a template that reads them, and change nothing else
- `continue_final_message` continues the last message; the answer sent is what follows, the recorded one is whole
- calls of tools that `allowed_tools` leaves out stay text
- the model has aliases, and a session may have more; `GET /v1/models/{id}` knows them
- `/tokenize` returns the ids that a prompt would have, and records nothing
- a base URL with a slash at its end works, and so does asking for it
- a session that overrides sampling ignores an agent's temperature, but not its lengths
"""

from typing import Any

import pytest
from tokenizers import Tokenizer

from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Distribution

from .conftest import QUESTION, TEMPLATE, OpenAgent, OpenWorld, new_renderer

READS_OPTIONS = (
    "{%- if enable_thinking is defined and not enable_thinking %}{{- 'no thinking ' }}{%- endif %}"
    "{{- reasoning_effort or '' }}" + TEMPLATE
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]


async def test_options_reach_the_template(open_agent: OpenAgent, backend: Tokenizer) -> None:
    agent = await open_agent(*["a<|im_end|>"] * 2, model=new_renderer(backend, READS_OPTIONS))
    options = {"chat_template_kwargs": {"enable_thinking": False, "unread": 1}, "reasoning_effort": "low"}
    await agent.post_chat(**options)
    assert agent.prompt().startswith("no thinking low<|im_start|>")
    await agent.post_chat(reasoning_effort="none", verbosity="high")
    assert agent.prompt().startswith("no thinking none<|im_start|>")


async def test_options_that_no_template_reads_change_nothing(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "b<|im_end|>")
    answer = (await agent.ask(QUESTION)).choices[0].message
    more = [*QUESTION, answer, {"role": "user", "content": "y"}]
    await agent.ask(more, reasoning_effort="high", verbosity="low", extra_body={"chat_template_kwargs": {"x": [1]}})
    assert agent.turns[1].parent == agent.turns[0].completions[0].id


@pytest.mark.parametrize("name", ["messages", "bos_token"])
async def test_options_cannot_replace_the_prompt(open_agent: OpenAgent, name: str) -> None:
    status, answer = await (await open_agent()).post_chat(chat_template_kwargs={name: "x"})
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
    assert name in answer["error"]["message"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("hello ", "world"),
        (" ", '{"name": "python", "arguments": {}}</tool_call>'),
        ("a <tool", "box> "),
        ('a <tool_call>{"name": "python", "arguments": {}}</tool_call>', "\nhello"),
        ("\n", "<think>hm</think> so"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
async def test_the_last_message_is_continued(
    open_agent: OpenAgent,
    thinking_renderer: Renderer,
    renderer: Renderer,
    is_streamed: bool,
    thinks: bool,
    given: str,
    said: str,
) -> None:
    agent = await open_agent(f"{said}<|im_end|>", "ok<|im_end|>", model=thinking_renderer if thinks else renderer)
    messages = [*QUESTION, {"role": "assistant", "content": given}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    reply = await agent.ask(messages, tools=TOOLS, stream=is_streamed, extra_body=extra)
    messages = [chunk.choices[0].delta async for chunk in reply] if is_streamed else [reply.choices[0].message]
    assert "".join(message.content or "" for message in messages) == said
    assert agent.prompt().endswith("assistant\n" + given)
    messages = [*QUESTION, {"role": "assistant", "content": given + said}, {"role": "user", "content": "y"}]
    await agent.ask(messages, tools=TOOLS)
    assert agent.turns[1].parent == agent.turns[0].completions[0].id
    assert agent.prompt().startswith(agent.prompt(0) + f"{said}<|im_end|>")


async def test_what_cannot_be_continued_is_refused(open_agent: OpenAgent) -> None:
    agent = await open_agent()
    for messages, says in (
        ([*QUESTION, {"role": "user", "content": "x"}], "only an assistant's message"),
        ([*QUESTION, {"role": "assistant", "content": "a<|im_end|>"}], "special tokens"),
        ([*QUESTION, {"role": "assistant", "content": "<think>a"}], "tags of thinking"),
        ([{"role": "assistant", "content": "a"}], ""),
    ):
        status, answer = await agent.post_chat(messages=messages, continue_final_message=True)
        assert (status, answer["error"]["param"]) == (400, f"messages[{len(messages) - 1}]")
        assert says in answer["error"]["message"]


async def test_calls_of_tools_that_are_not_allowed_stay_text(open_agent: OpenAgent) -> None:
    call = '<tool_call>{"name": "b", "arguments": {}}</tool_call><|im_end|>'
    agent = await open_agent(call, call)
    for name, finish_reason in (("a", "stop"), ("b", "tool_calls")):
        allowed: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": name}}]}
        reply = await agent.ask(QUESTION, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        assert reply.choices[0].finish_reason == finish_reason
    assert agent.prompt(0) == agent.prompt(1)  # the tools that are not allowed stay in the prompt
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "c"}}]}
    status, answer = await agent.post_chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


async def test_models_have_aliases(open_world: OpenWorld) -> None:
    world = await open_world(*["a<|im_end|>"] * 5, model_aliases=["gpt-x"])
    agent = await world.start(model_aliases=["mine"])
    assert {(await agent.post_chat(model=name))[0] for name in ("model", "default", "gpt-x", "mine")} == {200}
    status, answer = await agent.post_chat(model="other")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "'model' or 'default' or 'gpt-x'" in answer["error"]["message"]
    models = await agent.client.models.list()
    assert [one.id for one in models.data] == ["model", "gpt-x"]
    assert (await agent.client.models.retrieve("gpt-x")).id == "gpt-x"
    everything = await world.start(model_aliases=["*"])
    assert (await everything.post_chat(model="claude"))[0] == 200


async def test_tokenize_returns_the_ids_of_a_prompt(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "b<|im_end|>")
    answer = (await agent.ask(QUESTION)).choices[0].message
    more = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "y"}]
    status, tokens = await agent.world.call("/tokenize", {"messages": more}, key=agent.key)
    assert status == 200
    await agent.ask(more)
    assert tokens["tokens"] == list(agent.world.engine.requests[1].input_ids)
    assert tokens["count"] == len(tokens["tokens"])
    assert len(agent.turns) == 2
    _, tokens = await agent.world.call("/v1/tokenize", {"prompt": "hello"}, key=agent.key)
    assert tokens["tokens"] == agent.world.ids("hello")


@pytest.mark.parametrize("path", ["/v1//chat/completions", "/v1/chat/completions/", "//chat/completions"])
async def test_a_slash_too_many_is_forgiven(open_agent: OpenAgent, path: str) -> None:
    agent = await open_agent("a<|im_end|>")
    header = {"Authorization": f"Bearer {agent.key}"}
    status, _ = await agent.world.call(path, {"model": "model", "messages": QUESTION}, key=agent.key)
    assert status == 200
    async with agent.world.http.get(f"{agent.world.url}//v1/responses/x?stream=true", headers=header) as reply:
        assert (await reply.json())["error"]["param"] == "stream"


async def test_the_base_url_answers(open_world: OpenWorld) -> None:
    world = await open_world()
    async with world.http.head(world.url + "/") as reply:
        assert reply.status == 200


async def test_the_sessions_sampling_can_win(open_world: OpenWorld) -> None:
    world = await open_world(*["a<|im_end|>"] * 2)
    agent = await world.start(sampling_override=True, sampling={"temperature": 0.7})
    await agent.ask(QUESTION, temperature=0, top_p=0.5, max_tokens=7, presence_penalty=1)
    turn = agent.turns[0]
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.max_tokens) == (0.7, 1.0, 7)
    assert turn.completions[0].distribution is Distribution.EXACT


async def test_a_shorter_answer_than_the_sessions_is_no_contradiction(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>")
    agent = await world.start(sampling={"min_tokens": 9})
    assert (await agent.post_chat(max_tokens=5))[0] == 200
    status, answer = await world.call(
        "/rl/start_session", {"task_id": "t", "sampling": {"min_tokens": 9, "max_tokens": 5}}
    )
    assert (status, answer["error"]["param"]) == (400, "sampling.min_tokens")


async def test_lengths_and_end_tokens_are_honoured(open_world: OpenWorld) -> None:
    world = await open_world(*["a<|im_end|>b"] * 2)
    agent, (b,) = await world.start(), world.ids("b")
    answered, answer = await agent.post_chat(ignore_eos=True, stop_token_ids=[b], min_tokens=2, max_tokens=5)
    assert answered == 200
    assert answer["choices"][0]["message"]["content"] == "a<|im_end|>"  # the stop token is not part of the text
    sampling = world.engine.requests[0].sampling
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((b,), 2, True)
    await agent.post_chat(stop_token_ids=[b])
    assert world.engine.requests[1].sampling.stop_token_ids == (*world.renderer.stop_token_ids, b)
    status, refusal = await agent.post_chat(stop_token_ids=[10**6])
    assert (status, refusal["error"]["param"]) == (400, "stop_token_ids")
