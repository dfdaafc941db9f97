"""Every parameter is honoured, or refused by name:

- an unsupported parameter, a value of the wrong kind and an unknown name are each a 400 that names it
- values that ask for nothing are accepted, null everywhere
- errors inside parameters, messages and tools name their place, the value and the remedy
- a bias on a token that the model does not have is refused
- any JSON gives a checked request or an error that names what is wrong (property)
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import RequestError
from areal_agent.gateway.chat import ChatRequest
from areal_agent.gateway.completions import CompletionsRequest
from areal_agent.gateway.conversation import read_message
from areal_agent.gateway.messages import MessagesRequest
from areal_agent.gateway.responses import ResponsesRequest
from areal_agent.gateway.session import EndRequest, ExportRequest, RewardRequest, StartRequest
from areal_agent.tokens.forest import Forest
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Distribution

from .conftest import OpenAgent, OpenWorld


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


MINIMAL: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "hello"}]}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

REFUSED: list[tuple[str, Any]] = [
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 1, "01": 2}),
    ("logit_bias", [5]),
    ("frequency_penalty", 2.5),
    ("presence_penalty", "1"),
    ("repetition_penalty", 0),
    ("min_p", 1.5),
    ("response_format", "json"),
    ("logprobs", 5),
    ("top_logprobs", 3),
    ("return_token_ids", "yes"),
    ("store", True),
    ("parallel_tool_calls", 1),
    ("functions", [{"name": "f"}]),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content"}),
    ("service_tier", "priority"),
    ("web_search_options", {}),
    ("tool_choice", "required"),
    ("tool_choice", "any"),
    ("temprature", 1.0),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", 1.5),
    ("top_k", -2),
    ("max_tokens", 0),
    ("max_completion_tokens", "5"),
    ("seed", 0.5),
    ("seed", 2**63),
    ("n", 0),
    ("n", 129),
    ("model", 5),
    ("messages", []),
    ("messages", "hello"),
    ("tools", {}),
]


@pytest.mark.parametrize(("param", "value"), REFUSED, ids=lambda value: repr(value)[:40])
def test_what_is_not_supported_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ChatRequest.read(MINIMAL | {param: value})
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message


WRONG_TOOLS: list[tuple[Any, str]] = [
    (5, "tools[0]"),
    ({"type": "custom"}, "tools[0].type"),
    ({"type": "function"}, "tools[0].function"),
    ({"type": "function", "function": {"name": ""}}, "tools[0].function.name"),
    ({"type": "function", "function": {"name": "a" * 129}}, "tools[0].function.name"),
    ({"type": "function", "function": {"name": "a<|im_end|>b"}}, "tools[0].function.name"),
    ({"type": "function", "function": {"name": "f\n"}}, "tools[0].function.name"),
    ({"type": "function", "function": {"name": "f", "strict": "yes"}}, "tools[0].function.strict"),
    ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
    ({"type": "function", "function": {"name": "f", "description": nested(65)}}, "tools[0]"),
    ({"type": "function", "function": {"name": "f", "extra": 1}}, "tools[0].function.extra"),
]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({"tools": [tool]}, param) for tool, param in WRONG_TOOLS),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [TOOL], "response_format": SCHEMA}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
    ],
)
def test_faults_inside_a_parameter_name_their_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatRequest.read(MINIMAL | body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temprature": 1.0}, "unknown parameter 'temprature'; did you mean 'temperature'"),
        ({"n": 0}, "n is 0; it must be greater than or equal to 1"),
        ({"temperature": "1"}, "temperature is '1'; it must be a valid number"),
        ({"stop": 5}, "stop is 5; it must be a string or a list"),
        ({"stop": ["a", ""]}, "stop[1] is ''; it must have at least 1 character"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; it must be 'auto', 'none' or 'required'"),
        (
            {"tool_choice": {"type": "custom"}},
            "tool_choice.type is 'custom'; it must be one of 'function', 'allowed_tools'",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'; it must be one of 'text'"),
        ({"response_format": "json"}, "response_format is 'json'; it must be a JSON object"),
        ({"model": None}, "model is missing; it must be given"),
        ({"input": "hi"}, "unknown parameter 'input'; here it is 'messages'"),  # another protocol's name
        ({"stream": True, "stream_options": {"usage": True}}, "unknown parameter 'stream_options.usage'; valid: "),
    ],
)
def test_a_refusal_says_what_came_and_what_must_be(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatRequest.read(MINIMAL | body)
    assert caught.value.message.startswith(message)


def test_two_limits_must_agree() -> None:
    assert ChatRequest.read(MINIMAL | {"max_tokens": 5, "max_completion_tokens": 5}).max_tokens == 5
    with pytest.raises(RequestError, match="max_tokens is 5"):
        ChatRequest.read(MINIMAL | {"max_tokens": 5, "max_completion_tokens": 6})


HARMLESS: dict[str, Any] = {
    "user": "u",
    "metadata": {"k": "v"},
    "safety_identifier": "s",
    "prompt_cache_key": "p",
    "stream": False,
    "stop": [],
    "logit_bias": {},
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "response_format": {"type": "text"},
    "logprobs": False,
    "store": False,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "service_tier": "auto",
    "top_k": 0,
    "n": 1,
}


def test_values_that_ask_for_nothing_are_accepted() -> None:
    harmless = ChatRequest.read(MINIMAL | HARMLESS)
    params = harmless.params(num_room=9, stop_token_ids=(), seed=0)
    assert params.distribution is Distribution.EXACT
    assert (harmless.num_choices, harmless.stops, harmless.is_streamed) == (1, (), False)


def test_null_is_left_out() -> None:
    nulls = {name: None for name, _ in REFUSED if name not in MINIMAL} | dict.fromkeys(HARMLESS)
    assert ChatRequest.read(MINIMAL | nulls) == ChatRequest.read(MINIMAL)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        *(
            (
                [
                    {"role": "user", "content": "x"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": one}} for one in ("", wrong)],
                    },
                ],
                "messages[1].tool_calls[1].function.arguments",
            )
            for wrong in ([], "[1]", '"x"', "{x", '{"x": NaN}')
        ),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": None}], "messages[1].content"),
    ],
)
def test_faults_in_messages_name_their_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        for index, message in enumerate(ChatRequest.read({"model": "model", "messages": messages}).messages):
            read_message(message, index)
    assert caught.value.param == param


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_bias_of_no_token_is_refused(open_agent: OpenAgent, is_streamed: bool) -> None:
    agent = await open_agent("a<|im_end|>", vocab_size=400)
    status, answer = await agent.post_chat(logit_bias={"5": 1, "400": 1}, stream=is_streamed)
    assert (status, answer["error"]["param"]) == (400, "logit_bias")
    assert "ids below 400" in answer["error"]["message"]
    assert (await agent.post_chat(logit_bias={"399": 1}))[0] == 200


async def test_a_session_has_no_bias_of_no_token(open_world: OpenWorld) -> None:
    world = await open_world()
    status, answer = await world.call("/rl/start_session", {"task_id": "t", "sampling": {"logit_bias": {"300": 1}}})
    assert (status, answer["error"]["param"]) == (400, "sampling.logit_bias")


async def test_a_refusal_is_openais_error_object(open_world: OpenWorld) -> None:
    world = await open_world()
    status, answer = await (await world.start()).post_chat(store=True)
    assert status == 400
    assert answer == {
        "error": {
            "message": "store=True is not supported by this gateway; leave it out",
            "type": "invalid_request_error",
            "param": "store",
            "code": "unsupported_parameter",
        }
    }
    assert world.gateway.stats().errors == {400: 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "id"]),
            children,
            max_size=4,
        )
    ),
    max_leaves=8,
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles | json_values, "content": st.text(max_size=8) | json_values},
        optional={"name": json_values, "tool_calls": json_values, "tool_call_id": json_values},
    ),
    max_size=3,
)
known_names = st.sampled_from(
    sorted(
        {name for name, _ in REFUSED}
        | HARMLESS.keys()
        | {"task_id", "sampling", "reward", "interaction_id", "name", "prompt", "echo"}
        | {"input", "text", "reasoning", "include"}
    )
)
bodies = st.builds(
    lambda base, extra: base | extra,
    st.sampled_from([{}, MINIMAL]) | st.fixed_dictionaries({"model": st.just("model"), "messages": messages}),
    st.dictionaries(known_names | st.text(max_size=5), json_values, max_size=3),
)


@given(body=bodies)
def test_any_json_is_checked_or_refused(renderer: Renderer, body: dict[str, Any]) -> None:
    for read in (
        ChatRequest.read,
        CompletionsRequest.read,
        lambda body: MessagesRequest.read({"max_tokens": 9} | body),
        ResponsesRequest.read,
        StartRequest.read,
        RewardRequest.read,
        EndRequest.read,
        ExportRequest.read,
    ):
        try:
            request = read(body)
            if isinstance(request, ChatRequest | CompletionsRequest | MessagesRequest):
                for question in request.order().questions:
                    assert question.place(Forest(renderer), renderer).new_ids
        except RequestError as error:
            assert 400 <= error.status < 500
