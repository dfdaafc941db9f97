"""Tools with `strict: true`: a call of theirs reaches the agent only when its arguments match their schema.

No grammar holds the model to it while it samples; a call that does not match is a malformed one, and stays text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jsonschema_rs

from areal_agent.errors import RequestError
from areal_agent.tokens.answers.parsed import ToolCall
from areal_agent.types import JsonObject

Accepts = Callable[[ToolCall], bool]

LINEAR_PATTERNS = jsonschema_rs.RegexOptions()
"""Regular expressions without backtracking: a schema comes from outside and must not hold up the event loop."""


def strict_tools(tools: Sequence[JsonObject]) -> Accepts | None:
    """What decides whether a call may be one; None when no tool is strict.

    Raises RequestError for a schema that is none, or that refers to another document.
    """
    validators = {
        tool["function"]["name"]: _validator(tool["function"].get("parameters"), f"tools[{index}].function.parameters")
        for index, tool in enumerate(tools)
        if tool["function"].get("strict")
    }
    return _Accepts(validators) if validators else None


class _Accepts:
    """Calls of other tools are accepted as they are."""

    def __init__(self, validators: Mapping[str, "jsonschema_rs.Validator"]) -> None:
        self._validators = validators

    def __call__(self, call: ToolCall) -> bool:
        validator = self._validators.get(call.name)
        return validator is None or validator.is_valid(call.arguments)


def _validator(schema: JsonObject | None, param: str) -> "jsonschema_rs.Validator":
    try:
        return jsonschema_rs.validator_for(
            dict(schema or {}), retriever=_refuse_reference, pattern_options=LINEAR_PATTERNS
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:  # ValidationError is a ValueError
        raise RequestError(
            f"{param} is no JSON schema that can be checked ({error!s:.300}); mend it, or leave out 'strict'",
            param=param,
            code="invalid_value",
        ) from error


def _refuse_reference(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is another document; write its definitions into the schema")
