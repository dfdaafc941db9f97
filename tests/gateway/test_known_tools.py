"""Sets of tools are checked once and cached:

- the same JSON gives the same set, whoever sends it; JSON that differs in a byte gives another one
- 1, 1.0 and true are different, as are different orders of keys
- an invalid set is refused every time, however deep the error is
- a long set is not cached
"""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import RequestError
from areal_agent.gateway.tools import MAX_KNOWN_BYTES, Accepts, read_tools
from areal_agent.tokens.formats.base import ToolCall

scalars = st.sampled_from([0, 1, False, True, 0.0, -0.0, 1.0, "1", None, ""])
schemas = st.dictionaries(st.sampled_from("ab"), scalars, max_size=2)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def strict(value: object) -> list[Any]:
    """Return a tool that must be called with x equal to `value`."""
    schema = {"type": "object", "properties": {"x": {"const": value}}, "required": ["x"]}
    return [tool(strict=True, parameters=schema)]


def accepts(accepted: Accepts | None, x: object) -> bool:
    assert accepted is not None
    return accepted(ToolCall(name="f", arguments={"x": x}))


def test_the_same_json_is_checked_once() -> None:
    text = orjson.dumps(strict(1))
    assert read_tools(orjson.loads(text)) is read_tools(orjson.loads(text))


@given(sets=st.lists(schemas, max_size=8))
def test_what_comes_back_is_what_was_sent_to_the_byte(sets: list[dict[str, Any]]) -> None:
    for schema in [*sets, *sets]:
        sent = [tool(parameters=schema)]
        assert orjson.dumps(list(read_tools(sent).definitions)) == orjson.dumps(sent)


def test_one_and_true_are_told_apart() -> None:
    sets = [read_tools(strict(value)) for value in (1, True)]
    assert [[accepts(one.accepts, x) for x in (1, True)] for one in sets] == [[True, False], [False, True]]


@pytest.mark.parametrize("wrong", [{"a": 1}, [tool(strict=1)], [tool(strict=True, parameters={"type": 7})], "deep"])
def test_what_is_wrong_is_refused_every_time(wrong: Any) -> None:
    if wrong == "deep":
        wrong = [tool(parameters=orjson.loads(b'{"x":' * 500 + b"1" + b"}" * 500))]
    for _ in range(2):
        with pytest.raises(RequestError):
            read_tools(wrong)


def test_a_long_set_is_not_kept() -> None:
    long = [tool(description="x" * MAX_KNOWN_BYTES)]
    assert read_tools(long) is not read_tools(long)
    assert read_tools(long) == read_tools(long)
