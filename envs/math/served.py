"""One process of processes.py. It stands alone: `python -P served.py FILE MEMORY_BYTES CPU_S`.

It calls `prepare()` of FILE and writes `ready`, then reads arguments and writes what `answer` of FILE returns for them,
in JSON, a line each; `null` when that raises. The kernel kills this process after `CPU_S` seconds on one answer, and
refuses more than `MEMORY_BYTES`.
"""

import json
import os
import resource
import runpy
import signal
import sys


def main() -> None:
    file, memory_bytes, cpu_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the packages print is no answer
    served = runpy.run_path(file)
    served["prepare"]()
    print("ready", file=answers)
    for line in sys.stdin:
        # SIGVTALRM has no handler: it kills, in the middle of a C call too
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
        try:
            result = served["answer"](*json.loads(line))
        except Exception:  # the boundary: a question may make the packages raise almost anything
            result = None
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps(result), file=answers)


if __name__ == "__main__":
    main()
