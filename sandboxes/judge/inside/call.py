"""Calls one function of a program and writes its result as JSON. It runs in the program's own process.

A checker of a task's own is called in the same way, in a sandbox where the judged program never is.

stdin: `{"code": ..., "function": ..., "args": [...]}`. What the program prints goes to stderr; stdout gets the result.
Every case pays for loading this file, so it imports little, and its type hints need no imports.
"""

import json
import linecache
import os
import sys
import types

FILE = "<solution>"


def load(code: str, name: str) -> types.ModuleType:
    """Run a program as a module, not as `__main__`, whose part is not meant for calls."""
    module = sys.modules[name] = types.ModuleType(name)
    linecache.cache[FILE] = (len(code), None, [f"{line}\n" for line in code.split("\n")], FILE)  # for tracebacks
    exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)
    return module


def find(names: dict[str, object], function: str) -> object:
    if function in names:
        return names[function]
    if "Solution" in names:
        solution = names["Solution"]
        assert callable(solution)
        return getattr(solution(), function)
    raise NameError(f"the program defines no function {function!r}")


def written(result: object) -> str:
    """Return a result as JSON; if JSON cannot say it, as Python shows it, in <>, which equals no JSON."""
    try:
        return json.dumps(result)
    except (TypeError, ValueError, RecursionError):
        return f"<{result!a}>"


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    results = os.dup(1)
    os.dup2(2, 1)
    function = find(vars(load(request["code"], "solution")), request["function"])
    assert callable(function)
    data = written(function(*request["args"])).encode()
    while data:
        data = data[os.write(results, data) :]


if __name__ == "__main__":
    main()
