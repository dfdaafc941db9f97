"""Runs a checker of a task's own on one output. The judged program is not in this sandbox.

stdin: `{"checker": ..., "stdin": ..., "expected": ..., "output": ...}`. The checker defines
`check(stdin, expected, output)`; what it prints goes to stderr, what it returns to stdout.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names: dict[str, Any] = {"__name__": "checker"}
    exec(compile(request["checker"], "<checker>", "exec", dont_inherit=True), names)
    score = names["check"](request["stdin"], request["expected"], request["output"])
    json.dump(score, results)
    results.flush()


if __name__ == "__main__":
    main()
