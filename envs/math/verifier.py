"""The process that compares answers with math-verify. It stands alone: `python -P verifier.py MEMORY_BYTES CPU_S`.

It writes `ready`, then reads `[said, right]` in JSON, a line each, and writes `true`, `false`, or `null` when `right`
itself holds no expression. sympy evaluates what it parses, so an answer may take for ever or all memory: the kernel
kills this process after `CPU_S` seconds on one answer, and refuses more than `MEMORY_BYTES`.
"""

import json
import os
import resource
import signal
import sys


def is_right(said: str, right: str) -> bool | None:
    # imported here: pytest reads this file also where the extra `math` is not installed
    from math_verify import parse, verify

    expected = parse(right, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: no alarm of its own
    if not expected:
        return None
    found = parse(said, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return verify(expected, found, timeout_seconds=None)


def main() -> None:
    memory_bytes, cpu_s = int(sys.argv[1]), float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the packages print is no answer
    is_right("1", "1")  # builds the parser's tables
    print("ready", file=answers)
    for line in sys.stdin:
        signal.setitimer(
            signal.ITIMER_VIRTUAL, cpu_s
        )  # SIGVTALRM has no handler: it kills, in the middle of a C call too
        try:
            result = is_right(*json.loads(line))
        except Exception:  # the boundary: sympy raises almost anything on what is no mathematics
            result = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps(result), file=answers)


if __name__ == "__main__":
    main()
