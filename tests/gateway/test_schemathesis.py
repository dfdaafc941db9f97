"""Random requests, valid and invalid by the OpenAPI description:

- every request is answered, never with a 5xx; each answer matches the description, each failure is OpenAI's error
  object
- no answer contains anything of another session, or any key
- a body that is not a JSON object, or any JSON at all, is answered, too

Requests by the description, a hundred of each operation, are slow: to understand it takes seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from areal_agent.gateway.app import Gateway
from areal_agent.gateway.openapi import openapi_document
from areal_agent.tokens.renderer import Renderer

from .conftest import ADMIN_KEY, MemoryJournal
from .live import live_gateway
from .raw import is_error_object

DOCUMENT = openapi_document(is_leased_from=False)
POSTED = sorted(path for path, item in DOCUMENT["paths"].items() if "post" in item)
OPERATIONS = [  # without the shorter paths of the same handlers
    f"{method.upper()} {path}"
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    if not operation["operationId"].endswith("Short")
]
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SECRET = "what the other session said"
TIMEOUT_S = 20.0
ADMIN_PATHS = ("/rl/start_session", "/export_trajectories")

MANY = settings(max_examples=100, database=None, derandomize=False, suppress_health_check=list(HealthCheck))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@dataclass
class Live:
    """A gateway, and two sessions: that of the caller, and that of another who has said something."""

    url: str
    gateway: Gateway
    key: str = ""
    other_key: str = ""

    def start(self) -> str:
        answer = self.post("/rl/start_session", {"task_id": "t"}, ADMIN_KEY)
        return answer.json()["api_key"]

    def post(self, path: str, body: Any, key: str) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"}
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        return requests.post(self.url + path, headers=headers, timeout=TIMEOUT_S, **content)

    def key_for(self, path: str) -> str:
        """Return the key of the caller's open session; for an admin's call, the admin's."""
        if path in ADMIN_PATHS:
            return ADMIN_KEY
        if self.post("/rl/set_reward", {"reward": 1}, self.key).status_code != 200:
            self.key = self.start()
        return self.key


@pytest.fixture(scope="module")
def live(renderer: Renderer) -> Iterator[Live]:
    with live_gateway(renderer, MemoryJournal()) as (url, gateway):
        live = Live(url=url, gateway=gateway)
        live.other_key = live.start()
        messages = [{"role": "user", "content": SECRET}]
        assert live.post("/v1/chat/completions", {"model": "model", "messages": messages}, live.other_key).ok
        live.key = live.start()
        yield live


def check_answer(live: Live, answer: Any) -> None:
    """Check what is true of every answer."""
    assert answer.status_code < 500
    assert SECRET not in answer.text
    assert live.other_key not in answer.text
    if answer.status_code >= 400:
        assert is_error_object(answer.json()), answer.text
        assert live.key not in answer.text
    assert not [status for status in live.gateway.stats().errors if status >= 500]


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_calls_by_the_description(live: Live, operation: str) -> None:
    def call(case: Case) -> None:
        headers = {"Authorization": f"Bearer {live.key_for(case.path)}"}
        answer = case.call(base_url=live.url, headers=headers, timeout=TIMEOUT_S)
        check_answer(live, answer)
        case.validate_response(answer, checks=CHECKS, headers=headers)

    document = openapi_document(is_leased_from=False)
    for name in ("ChatRequest", "CompletionsRequest", "ResponsesRequest", "MessagesRequest", "CountRequest"):
        # this gateway's model alone: most calls would go into finding its name
        document["components"]["schemas"][name]["properties"]["model"] = {"const": "model"}
    schema = schemathesis.openapi.from_dict(document).include(name=operation)
    # `schema.parametrize()` would make its examples, for seconds, wherever tests are collected
    (made,) = get_all_tests(schema=schema, test_func=call, settings=MANY, given_kwargs=None)
    made.ok()[1]()


@given(path=st.sampled_from(POSTED), body=st.binary(max_size=64) | JSON)
def test_any_body(live: Live, path: str, body: Any) -> None:
    check_answer(live, live.post(path, body, live.key_for(path)))


QUESTION: list[Any] = [{"role": "user", "content": "x"}]
PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": QUESTION},
        "messages tools tool_choice stop logit_bias response_format n seed",
    ),
    "/v1/responses": ({"input": "x"}, "input tools tool_choice text reasoning include previous_response_id"),
    "/v1/messages": (
        {"messages": QUESTION, "max_tokens": 9},
        "messages tools tool_choice system thinking output_config stop_sequences top_k",
    ),
}


@pytest.mark.parametrize("path", PARAMETERS)
@given(data=st.data(), value=JSON)
def test_any_value_of_a_parameter(live: Live, path: str, data: st.DataObject, value: Any) -> None:
    body, fields = PARAMETERS[path]
    field = data.draw(st.sampled_from(fields.split()))
    check_answer(live, live.post(path, {"model": "model"} | body | {field: value}, live.key_for(path)))
