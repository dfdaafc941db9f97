"""Bodies that repeat each other are decoded as if each came alone; repeated messages are the same objects."""

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.gateway.bodies import MAX_KEPT_BYTES, GrowingBody

texts = st.text() | st.sampled_from(["]", "}]", '"', "\\", "],", "é", "\u2028", '{"messages":[', "😀"])
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | texts, lambda inner: st.lists(inner, max_size=2))
messages = st.dictionaries(texts, values, max_size=3) | st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool"]), "content": texts}
)
rests = st.dictionaries(st.sampled_from(["model", "tools", "n", "messages"]), values, max_size=3)


def compact(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def escaped(body: object) -> bytes:
    return json.dumps(body).encode()


def indented(body: object) -> bytes:
    return json.dumps(body, indent=1).encode()


LAYOUTS = (compact, escaped, indented)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Draw the bodies of one session: each continues, begins anew or repeats, in one layout or another."""
    history: list[Any] = []
    bodies: list[bytes] = []
    for _ in range(draw(st.integers(1, 6))):
        kept = draw(st.integers(0, len(history)) | st.just(len(history)))
        history = [*history[:kept], *draw(st.lists(messages | values, max_size=3))]
        payload = draw(st.sampled_from(LAYOUTS))({**draw(rests), "messages": history, **draw(rests)})
        damage = draw(st.sampled_from([None, None, None, b"", b"]", b'{"a":1}', b',"messages":[1]}']))
        bodies.append(payload if damage is None else payload[: -draw(st.integers(1, 9))] + damage)
    return bodies


@st.composite
def growing_bodies(draw: st.DrawFn) -> list[bytes]:
    """Draw bodies of the usual kind: each adds messages only; the last one may be damaged."""
    layout, first, rest = draw(st.sampled_from(LAYOUTS)), draw(rests), draw(rests)
    history: list[Any] = []
    bodies: list[bytes] = []
    for _ in range(draw(st.integers(3, 6))):
        history = [*history, *draw(st.lists(messages, min_size=1, max_size=3))]
        bodies.append(layout({**first, "messages": history, **rest}))
    place, damage = draw(st.integers(0, len(bodies[-1]))), draw(st.sampled_from([b"", b",", b",1", b"]", b"}", b",{}"]))
    return [*bodies[:-1], bodies[-1][:place] + damage + bodies[-1][place:]]


def decoded(payload: bytes) -> object:
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        return str(error)


@given(bodies=conversations() | growing_bodies())
def test_each_body_is_decoded_as_if_it_came_alone(bodies: list[bytes]) -> None:
    growing = GrowingBody()
    for payload in bodies:
        try:
            body = growing.decode(payload)
        except orjson.JSONDecodeError as error:
            body = str(error)
        assert body == decoded(payload)


@pytest.mark.parametrize("dump", LAYOUTS[:2])
def test_repeated_messages_are_not_decoded_again(dump: Callable[[object], bytes]) -> None:
    growing, history, before = GrowingBody(), [{"role": "system", "content": "ä ]"}], list[object]()
    for number in range(4):
        history += [{"role": "user", "content": f"ö{number}]"}]
        sent = {"tools": [{"ü": ["messages"]}], "messages": history, "model": "m"}
        body: Any = growing.decode(dump(sent))
        assert body == sent
        assert all(old is new for old, new in zip(before, body["messages"], strict=False))
        before = body["messages"]


def test_of_a_repeated_key_the_last_value_counts() -> None:
    growing = GrowingBody()
    growing.decode(b'{"messages":[{"a":1}]}')
    assert growing.decode(b'{"messages":[{"a":1}],"messages":[{"b":2}]}') == {"messages": [{"b": 2}]}


def test_list_that_another_field_also_has_is_not_taken_for_the_messages() -> None:
    body = {"messages": [], "x": {"y": ["a"], "x": 2}}
    assert GrowingBody().decode(compact(body)) == body


def test_nothing_of_a_long_body_is_kept() -> None:
    growing, payload = GrowingBody(), compact({"messages": [{"content": "x" * MAX_KEPT_BYTES}]})
    first: Any = growing.decode(payload)
    second: Any = growing.decode(payload)
    assert first == second and first["messages"][0] is not second["messages"][0]
