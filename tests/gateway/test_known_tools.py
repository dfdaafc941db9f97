"""Sets of tools are checked once.

- the same JSON gives the same set, whoever sends it; JSON that differs in a byte gives one of its own
- 1, 1.0 and true are told apart, as are the orders of keys
- what is wrong is refused every time, however deep it is
- the sets used last are kept, no more
"""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import RequestError
from areal_agent.gateway.conversation import MAX_SET_BYTES, MAX_SETS, Accepts, KnownTools, Tools
from areal_agent.tokens.formats.base import ToolCall

scalars = st.sampled_from([0, 1, False, True, 0.0, -0.0, 1.0, "1", None, ""])
schemas = st.dictionaries(st.sampled_from("ab"), scalars, max_size=2)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def strict(value: object) -> list[Any]:
    """A tool that must be called with x equal to `value`."""
    schema = {"type": "object", "properties": {"x": {"const": value}}, "required": ["x"]}
    return [tool(strict=True, parameters=schema)]


def accepts(accepted: Accepts | None, x: object) -> bool:
    assert accepted is not None
    return accepted(ToolCall(name="f", arguments={"x": x}))


def test_the_same_json_is_checked_once() -> None:
    known = KnownTools()
    text = orjson.dumps(strict(1))
    assert known.read(orjson.loads(text)) is known.read(orjson.loads(text))


@given(sets=st.lists(schemas, max_size=8))
def test_what_comes_back_is_what_was_sent_to_the_byte(sets: list[dict[str, Any]]) -> None:
    known = KnownTools()
    for schema in [*sets, *sets]:
        sent = [tool(parameters=schema)]
        assert orjson.dumps(list(known.read(sent).definitions)) == orjson.dumps(sent)


def test_one_and_true_are_told_apart() -> None:
    known = KnownTools()
    sets = [known.read(strict(value)) for value in (1, True)]
    assert [[accepts(one.accepts, x) for x in (1, True)] for one in sets] == [[True, False], [False, True]]


@pytest.mark.parametrize("wrong", [{"a": 1}, [tool(strict=1)], [tool(strict=True, parameters={"type": 7})], "deep"])
def test_what_is_wrong_is_refused_every_time(wrong: Any) -> None:
    known = KnownTools()
    if wrong == "deep":
        wrong = [tool(parameters=orjson.loads(b'{"x":' * 500 + b"1" + b"}" * 500))]
    for _ in range(2):
        with pytest.raises(RequestError):
            known.read(wrong)


def test_the_sets_used_last_are_kept() -> None:
    known = KnownTools()
    first, second = (known.read(strict(number)) for number in (0, 1))
    for number in range(2, MAX_SETS + 1):
        assert known.read(strict(0)) is first
        known.read(strict(number))
    assert known.read(strict(0)) is first
    assert known.read(strict(1)) is not second


def test_a_long_set_is_not_kept() -> None:
    known, long = KnownTools(), [tool(description="x" * MAX_SET_BYTES)]
    assert known.read(long) is not known.read(long)
    assert known.read(long) == Tools.read(long)
