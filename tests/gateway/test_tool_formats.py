"""Tool calls through the gateway, with the models' own templates:

- a call is read, whole and streamed, with arguments of the types that the tool says; the result goes on from it
- a forced call begins in the prompt, ending the reasoning first where the template opens it
- requests with tools are refused where calls could not be read back; not without tools, nor where a format was named
"""

import json
from typing import Any

import pytest

from areal_agent.tokens.formats.answer_format import ToolFormat
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.renderer import Renderer
from tests.tokens.conftest import train_tokenizer
from tests.tokens.test_real_templates import FORGETFUL, MODELS, renderer

from .conftest import OpenWorld

QUESTION: list[Any] = [{"role": "user", "content": "Who lives in fire?"}]
CALL = ToolCall(name="look_up", arguments={"word": "42", "count": 3})
PROPERTIES = {
    "word": {"type": "string", "description": "What to look up."},
    "count": {"type": "integer", "description": "How many."},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["word"]}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks a word up.", "parameters": PARAMETERS},
}
PLAIN = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def answers_of(model: Renderer) -> list[list[int]]:
    """Return the tokens of a call and of a text, both after reasoning where the model reasons."""
    function = {"name": CALL.name, "arguments": CALL.arguments}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": "x", "tool_call_id": "abcdefghi"}
    asked = (QUESTION, [*QUESTION, called | {"reasoning_content": "Hm."}, result])
    answers: list[list[int]] = []
    for messages, said, end in zip(asked, (("", [CALL]), ("A salamander.",)), model.end_texts[::-1] * 2, strict=False):
        thinking = model.answer_format.thinking
        text = model.answer_format.format(*said, reasoning="Hm." if thinking else None)
        if thinking and opens_thinking(model, messages):
            text = text.removeprefix(thinking.opening)
        answers.append(model.ids_of(text + end))
    return answers


def opens_thinking(model: Renderer, messages: Any = QUESTION) -> bool:
    return model.thinking.is_open(model.split_opened(model.render(messages, [TOOL]))[1])


@pytest.mark.parametrize("name", MODELS)
async def test_a_call_and_its_result(open_world: OpenWorld, name: str) -> None:
    model = renderer(name)
    options: dict[str, Any] = {"model": model, "vocab_size": model.vocab_size, "max_context_tokens": 9000}
    agent = await (await open_world(script=answers_of(model), **options)).start()
    message = (await agent.ask(QUESTION, tools=[TOOL])).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (CALL.name, CALL.arguments)
    assert (message.content or "", getattr(message, "reasoning_content", None)) == (
        "",
        "Hm." if model.answer_format.thinking else None,
    )
    assert name != "kimi_k2" or call.id == "functions.look_up:0"  # the model's own id
    result = {"role": "tool", "tool_call_id": call.id, "content": "a salamander"}
    final = await agent.ask([*QUESTION, message, result], tools=[TOOL])
    assert final.choices[0].message.content == "A salamander."
    assert agent.turns[1].parent == agent.turns[0].completions[0].id
    assert (agent.turns[1].fork_reason is None) == (name not in FORGETFUL)

    streaming = await (await open_world(script=answers_of(model), **options)).start()
    stream = await streaming.ask(QUESTION, tools=[TOOL], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    calls = [one for delta in deltas for one in delta.tool_calls or []]
    assert [(one.function.name, one.function.arguments) for one in calls] == [(CALL.name, CALL.arguments_json)]
    assert not "".join(delta.content or "" for delta in deltas)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tool_name", [CALL.name, None])
async def test_a_forced_call(open_world: OpenWorld, name: str, tool_name: str | None) -> None:
    model = renderer(name)
    opening = model.answer_format.opening(tool_name)
    rest = model.answer_format.format("", [CALL]).removeprefix(opening) + model.end_texts[-1]
    world = await open_world(
        script=[model.ids_of(rest)], model=model, vocab_size=model.vocab_size, max_context_tokens=9000
    )
    agent = await world.start()
    choice = {"type": "function", "function": {"name": tool_name}} if tool_name else "required"
    (call,) = (await agent.ask(QUESTION, tools=[TOOL], tool_choice=choice)).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == CALL.arguments
    sampled, ids = agent.turns[0].completions[0].token_ids, tuple(model.ids_of(rest))
    assert sampled in (ids, ids[:-1])  # the end of the call's block is sampled, too
    prompt = model.text_of(agent.turns[0].new_prompt_ids, has_ended=False)
    assert prompt.endswith(model.answer_format.opening(tool_name))


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tools_whose_calls_could_not_be_read_are_refused(open_world: OpenWorld, choice: str) -> None:
    model = Renderer(train_tokenizer(PLAIN))
    agent = await (await open_world("<|im_end|>", model=model, vocab_size=model.vocab_size)).start()
    status, body = await agent.post_chat(messages=QUESTION, tools=[TOOL], tool_choice=choice)
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "--tool-format" in body["error"]["message"]


@pytest.mark.parametrize("tool_format", [None, ToolFormat.NONE, ToolFormat.HERMES])
async def test_what_is_not_refused(open_world: OpenWorld, tool_format: ToolFormat | None) -> None:
    model = Renderer(train_tokenizer(PLAIN), tool_format=tool_format)
    world = await open_world(script=[model.ids_of("Hi.<|im_end|>")], model=model, vocab_size=model.vocab_size)
    more: dict[str, Any] = {"tool_choice": "none"} if tool_format is None else {}
    reply = await (await world.start()).ask(QUESTION, tools=[TOOL], **more)
    assert reply.choices[0].message.content == "Hi."
