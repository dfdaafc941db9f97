"""A call as one JSON object, `{"name": ..., "arguments": {...}}`, and the parts that other forms share with it."""

import json
import re

from areal_agent.tokens.answers.call import OpenCall
from areal_agent.tokens.answers.json_scan import pass_object, pass_value, read_string
from areal_agent.tokens.answers.parsed import ToolCall
from areal_agent.tokens.answers.tape import MalformedCall, Steps, Tape

BARE_NAME = re.compile(r"[\w.:/-]*")
"""A tool's name where no quotes surround it."""


def read_envelope(
    tape: Tape, call: OpenCall, *, argument_keys: tuple[str, ...], other_keys: tuple[str, ...] | None = None
) -> Steps[None]:
    """Take the object whose `{` has been taken, its keys in any order. `other_keys` may stand in it too; None: any."""
    separator = ","
    while separator == ",":
        key = yield from read_string(tape)
        yield from tape.expect(":")
        if key == "name":
            call.set_name((yield from read_string(tape)))
        elif key in argument_keys:
            yield from tape.expect("{")
            yield from read_arguments(tape, call)
        elif other_keys is None or key in other_keys:
            yield from pass_value(tape)
        else:
            raise MalformedCall
        separator = yield from tape.expect(",", "}")


def read_arguments(tape: Tape, call: OpenCall) -> Steps[None]:
    """Take the object of the arguments, whose `{` has been taken."""
    call.begin_arguments()
    if call.is_streamed or not tape.take_object():
        yield from pass_object(tape)
    call.end_arguments()


def write_envelope(call: ToolCall, argument_key: str) -> str:
    """As the templates write it.

    >>> write_envelope(ToolCall(name="f", arguments={"x": 1}), "arguments")
    '{"name": "f", "arguments": {"x": 1}}'
    """
    return f"{open_envelope(call.name, argument_key)} {call.arguments_json}}}"


def open_envelope(name: str, argument_key: str) -> str:
    """Up to the arguments; the space before them is left to the model, whose tokens may hold both."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{argument_key}":'
