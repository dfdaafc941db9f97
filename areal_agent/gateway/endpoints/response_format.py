"""`response_format`: the JSON schema that an answer must match. It knows no grammar: the engine has one or not."""

import orjson

from areal_agent.gateway.fields import as_flag, as_name, as_object, as_shallow_object, refuse, refuse_unknown
from areal_agent.types import JsonObject

ANY_OBJECT = '{"type":"object"}'


def read_response_format(value: object) -> str | None:
    """The schema as JSON text, None for plain text; raises RequestError naming what is wrong.

    >>> read_response_format({"type": "json_object"})
    '{"type":"object"}'
    """
    if value is None:
        return None
    wanted = as_object(value, "response_format")
    match wanted.get("type"):
        case "text":
            refuse_unknown(wanted, ("type",), "response_format.")
            return None
        case "json_object":
            refuse_unknown(wanted, ("type",), "response_format.")
            return ANY_OBJECT
        case "json_schema":
            refuse_unknown(wanted, ("type", "json_schema"), "response_format.")
            return _read_schema(as_object(wanted.get("json_schema"), "response_format.json_schema"))
        case other:
            refuse("response_format.type", other, "'text', 'json_object' or 'json_schema'")


def _read_schema(wanted: JsonObject) -> str:
    where = "response_format.json_schema."
    refuse_unknown(wanted, ("name", "description", "schema", "strict"), where)
    as_name(wanted.get("name"), where + "name")
    as_flag(wanted.get("strict"), where + "strict")  # the grammar is always followed to the letter
    schema = as_shallow_object(wanted.get("schema"), where + "schema")
    return orjson.dumps(schema).decode()
