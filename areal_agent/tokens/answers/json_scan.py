"""Where a JSON value on the tape ends, found as it comes.

Strict in what holds the value together (brackets, quotes, commas, colons), so that a broken one is noticed where it
breaks; lenient in what stands between (numbers, escapes): `json_text` judges the whole value afterwards.
"""

import re

from areal_agent.tokens.answers.tape import SPACE, MalformedCall, Steps, Tape
from areal_agent.tokens.canonical import MAX_DEPTH, parse_json_object

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+', re.DOTALL)
_SCALAR = re.compile(r"[\w.+-]*")


def read_string(tape: Tape) -> Steps[str]:
    """Take a string and return its value."""
    yield from tape.expect('"')
    raw = yield from _rest_of_string(tape)
    if "\\" not in raw:
        return raw
    value = parse_json_object(f'{{"": "{raw}"}}')
    if value is None:
        raise MalformedCall
    return value[""]


def pass_object(tape: Tape, depth: int = 0) -> Steps[None]:
    """Take an object whose `{` has been taken."""
    if (yield from tape.accept("}")):
        return
    separator = ","
    while separator == ",":
        yield from tape.expect('"')
        yield from _rest_of_string(tape)
        yield from tape.expect(":")
        yield from pass_value(tape, depth + 1)
        separator = yield from tape.expect(",", "}")


def pass_value(tape: Tape, depth: int = 0) -> Steps[None]:
    """Take a value of any kind."""
    if depth > MAX_DEPTH:
        raise MalformedCall
    match (yield from tape.accept("{", "[", '"')):
        case "{":
            yield from pass_object(tape, depth)
        case "[":
            yield from _rest_of_list(tape, depth)
        case '"':
            yield from _rest_of_string(tape)
        case _:
            yield from _pass_scalar(tape)


def _rest_of_list(tape: Tape, depth: int) -> Steps[None]:
    if (yield from tape.accept("]")):
        return
    separator = ","
    while separator == ",":
        yield from pass_value(tape, depth + 1)
        separator = yield from tape.expect(",", "]")


def _rest_of_string(tape: Tape) -> Steps[str]:
    """Take a string whose first quote has been taken; returns what stands between the quotes."""
    begin = len(tape.taken)
    while True:
        yield from tape.run(_IN_STRING)
        character = yield from tape.one()
        if character == '"':
            return "".join(tape.taken[begin:-1])
        if character != "\\":
            raise MalformedCall
        yield from tape.one()


def _pass_scalar(tape: Tape) -> Steps[None]:
    yield from tape.run(SPACE)
    if not (yield from tape.run(_SCALAR)):
        raise MalformedCall
