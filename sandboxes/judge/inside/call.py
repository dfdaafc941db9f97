"""Calls one function of a program and writes its result as JSON. It runs in the program's own process.

stdin: `{"code": ..., "function": ..., "args": [...]}`. What the program prints goes to stderr; stdout is the result's.
"""

import json
import linecache
import os
import sys
import types
from collections.abc import Callable
from typing import Any

FILE = "<solution>"
MODULE = "solution"


def load(code: str) -> dict[str, Any]:
    """The names of a program that was run as a module: not as `__main__`, whose part is not meant for calls."""
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    linecache.cache[FILE] = (len(code), None, [f"{line}\n" for line in code.split("\n")], FILE)  # for tracebacks
    exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def find(names: dict[str, Any], function: str) -> Callable[..., Any]:
    if function in names:
        return names[function]
    if "Solution" in names:
        return getattr(names["Solution"](), function)
    raise NameError(f"the program defines no function {function!r}")


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = find(load(request["code"]), request["function"])(*request["args"])
    json.dump(result, results)
    results.flush()


if __name__ == "__main__":
    main()
