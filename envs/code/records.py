"""Records of published data sets as problems: LiveCodeBench, TACO and APPS, HumanEval.

A record is what `datasets` or a line of JSON gives: a dict. A malformed one raises ValueError, which names the field.
Records come from elsewhere and are not trusted: their pickles may hold only plain data, and reading one runs no code.
"""

import ast
import base64
import binascii
import io
import json
import pickle
import pickletools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from sandboxes.judge.verdict import CallCase, Case, Cases, StdinCase, UnitTests, told

Record = Mapping[str, Any]
MAX_TESTS_BYTES = 512 * 2**20
"""The most bytes that packed tests may unpack to."""
USUAL_NAMES = """\
import bisect, collections, functools, heapq, itertools, math, operator, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""
"""The imports that sites for such problems make before a solution runs, and that solutions rely on."""
FUTURE = "from __future__ import "


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A task and the cases that judge its answer."""

    id: str
    prompt: str  # the task; for HumanEval, the beginning of the program
    cases: Cases
    starter_code: str = ""  # code that an answer fills in
    preamble: str = ""  # code that goes before an answer

    def complete(self, answer: str) -> str:
        r"""Return the program to grade: the preamble, then the answer.

        >>> Problem(id="1", prompt="", cases=[], preamble="import math").complete("from __future__ import annotations")
        'from __future__ import annotations\nimport math'
        """
        if not self.preamble:
            return answer
        lines = answer.split("\n")
        future = [line for line in lines if line.startswith(FUTURE)]  # must come first
        rest = [line for line in lines if not line.startswith(FUTURE)]
        return "\n".join([*future, self.preamble.rstrip(), *rest])


def from_livecodebench(record: Record) -> Problem:
    """Read a record of LiveCodeBench: `public_test_cases`, and the packed `private_test_cases`."""
    function = field(record, "metadata", dict).get("func_name")
    public, packed = field(record, "public_test_cases", list), field(record, "private_test_cases", str)
    return Problem(
        id=field(record, "question_id", str),
        prompt=field(record, "question_content", str),
        cases=[case_of(test, function) for test in (*public, *unpacked(packed))],
        starter_code=record.get("starter_code") or "",
        preamble=USUAL_NAMES,
    )


def from_apps(record: Record) -> Problem:
    """Read a record of APPS or TACO: `input_output` with `inputs`, `outputs` and, if calls are judged, `fn_name`.

    If every output of the calls is a list of one value, that value is the result.
    """
    tests = field(record, "input_output", dict)
    inputs, outputs = (checked(tests.get(name), f"input_output.{name}", list) for name in ("inputs", "outputs"))
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"the record has {len(inputs)} inputs and {len(outputs)} outputs; give as many of each, at least one"
        )
    function = tests.get("fn_name")
    if function and all(isinstance(output, list) and len(cast(list[Any], output)) == 1 for output in outputs):
        outputs = [output[0] for output in outputs]
    pairs = zip(inputs, outputs, strict=True)
    return Problem(
        id=str(record.get("problem_id", record.get("id", record.get("name", "")))),
        prompt=field(record, "question", str),
        cases=[CallCase(function=function, args=checked(args, "inputs", list), expected=out) for args, out in pairs]
        if function
        else [StdinCase(stdin=joined(given), expected=joined(expected)) for given, expected in pairs],
        starter_code=record.get("starter_code") or "",
        preamble=USUAL_NAMES,
    )


def from_humaneval(record: Record) -> Problem:
    """Read a record of HumanEval: `prompt`, `entry_point`, and a `test` that defines `check(candidate)`.

    The tests run in another sandbox than the program (see `UnitTests`), with whatever the prompt defines beside the
    function. An answer continues the prompt or is the whole function.
    """
    prompt, function, test = (field(record, name, str) for name in ("prompt", "entry_point", "test"))
    for name, source in (("prompt", prompt), ("test", test)):
        try:
            ast.parse(source)
        except (SyntaxError, ValueError):
            raise ValueError(f"the record's {name!r} is not Python: {source[:200]!r}") from None
    if not function.isidentifier():
        raise ValueError(f"the record's 'entry_point' is {function!r}; it must be the name of a function")
    imports = f"from solution import {function}"
    judges = f"def test_{function}():\n    check({function})\n"
    return Problem(
        id=field(record, "task_id", str),
        prompt=prompt,
        cases=UnitTests(files={"test_humaneval.py": "\n\n".join((prompt.rstrip(), imports, test, judges))}),
        preamble=prompt,
    )


def case_of(test: Any, function: str | None) -> Case:
    """Make a case of two texts; for a call, its arguments as JSON, one per line, and its result as JSON."""
    match test:
        case {"input": str(given), "output": str(expected)}:
            pass
        case _:
            raise ValueError(f"a test of the record is {told(test)}; it needs the texts 'input' and 'output'")
    if not function:
        return StdinCase(stdin=given, expected=expected)
    try:
        args = [json.loads(line) for line in given.split("\n") if line.strip()]
        return CallCase(function=function, args=args, expected=json.loads(expected))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a test of {function} is not JSON: {given[:200]!r} to {expected[:200]!r}") from error


def unpacked(packed: str) -> list[Any]:
    """Return private tests, given as a JSON list, or as that list as text, pickled, compressed and in base64."""
    try:
        return checked(json.loads(packed), "private_test_cases", list)
    except (json.JSONDecodeError, RecursionError):
        pass
    try:
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(packed, validate=True), MAX_TESTS_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"the record's tests unpack to more than {MAX_TESTS_BYTES:,} bytes")
        tests = load_plain(pickled)
        return checked(json.loads(tests) if isinstance(tests, str) else tests, "private_test_cases", list)
    except (binascii.Error, zlib.error, pickle.UnpicklingError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the record's 'private_test_cases' cannot be unpacked: {error}") from error


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that refuses everything that is looked up by name: classes, functions, and so anything callable."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"this pickle asks for {module_name}.{global_name}; only plain data is read")


MEMO = ("PUT", "BINPUT", "LONG_BINPUT")
"""The codes of a pickle that give an object a number."""


def load_plain(data: bytes) -> Any:
    """Return the plain data of a pickle; UnpicklingError for anything else.

    >>> load_plain(pickle.dumps([{"input": "1"}]))
    [{'input': '1'}]
    """
    try:
        memo = (place or 0 for code, place, _ in pickletools.genops(data) if code.name in MEMO)
        if max(memo, default=0) > len(data):  # Python reserves all places up to the highest
            raise pickle.UnpicklingError("it numbers more objects than it has bytes")
        return PlainUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # the boundary: a damaged pickle makes the unpickler raise almost anything
        raise pickle.UnpicklingError(f"this is not a pickle: {error!r}") from error


def joined(lines: Any) -> str:
    """Return a text, or join the lines of one."""
    if isinstance(lines, list):
        return "\n".join(str(line) for line in cast(list[Any], lines))
    return checked(lines, "inputs or outputs", str)


def field(record: Record, name: str, kind: type[Any]) -> Any:
    """Return a field, decoded if it is JSON text but should be something else."""
    value = record.get(name)
    if isinstance(value, str) and kind is not str:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the record's {name!r} is not JSON: {value[:200]!r}") from error
    return checked(value, name, kind)


def checked(value: Any, name: str, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the record's {name!r} is {told(value)}; it must be a {kind.__name__}")
    return value
