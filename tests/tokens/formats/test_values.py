"""Values that are written as bare text, read by the schemas of tools:

- what a schema allows, in whatever way it says so, decides; what fits no type stays text
- any JSON may stand for a schema, also one that refers to itself
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.tokens.formats.values import ParameterTypes, types_of

COLOR = {"$defs": {"Color": {"enum": ["red", 3]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]}}}
keywords = st.sampled_from(["type", "enum", "const", "anyOf", "$ref", "properties", "items"])
schemas = st.recursive(
    st.none() | st.integers() | st.sampled_from(["#", "#/x", "#/anyOf", "string", "null"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords, inner, max_size=3),
)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "boolean"}, "False", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": "array"}, "[1, {}]", [1, {}]),
        ({"type": "object"}, '{"a": ', '{"a": '),
        ({"type": "object"}, "[" * 99 + "]" * 99, "[" * 99 + "]" * 99),
        ({"properties": {}}, "{}", {}),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "true", True),
        ({"oneOf": [{"type": "array"}, {"type": "null"}]}, "[]", []),
        ({"$ref": "#/$defs/Color"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        ({"$ref": "elsewhere"}, "3", "3"),
        ({}, "3", "3"),
        (None, "3", "3"),
    ],
)
def test_what_a_schema_allows_decides(schema: Any, text: str, value: object) -> None:
    function = {"name": "f", "parameters": {"properties": {"x": schema}, **COLOR}}
    found = ParameterTypes([{"function": {"name": "g"}}, {"function": function}]).value("f", "x", text)
    assert (found, type(found)) == (value, type(value))


@given(schema=schemas, root=st.dictionaries(keywords, schemas, max_size=3))
def test_any_schema(schema: Any, root: dict[str, Any]) -> None:
    assert all(isinstance(one, str) for one in types_of(schema, root))
