"""Scripted runs that are born at once and die when they are told to: a process that has imported all, and forks them.

Reads lines `FOLDER STEPS POINT NUMBER`: a child lives on the run in FOLDER and kills itself, by a real SIGKILL, when it
has passed that commit point so many times (`never`: it does not). Writes `pid N`, a line for every commit point and
every answer of the engine, then `dead STATUS`. Ends at the end of its input. Started by the tests of this folder.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

from areal_agent.trainer.checkpoint import CommitPoint
from areal_agent.types import GenerateRequest
from tests.resume.scripted_run import answer, live

NEVER = "never"


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def run(folder: Path, tokenizer: Path, num_steps: int, fatal: str, number: int) -> None:
    passed: Counter[str] = Counter()
    alone = threading.Lock()  # of steps and the save beside them

    def passing(point: CommitPoint) -> None:
        with alone:
            tell(point)
            passed[point] += 1
            if point == fatal and passed[point] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    def told(request: GenerateRequest) -> list[int]:
        tell("answer")
        return answer(request)

    asyncio.run(live(folder, tokenizer, num_steps, passing, told))


def fork(folder: Path, tokenizer: Path, num_steps: int, fatal: str, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        tell(f"pid {os.getpid()}")  # itself: its parent may be late, and this has to come first
        run(folder, tokenizer, num_steps, fatal, number)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    logging.disable(logging.WARNING)
    tokenizer = Path(sys.argv[1])
    for line in sys.stdin:
        folder, num_steps, fatal, number = line.split()
        pid = fork(Path(folder), tokenizer, int(num_steps), fatal, int(number))
        _, status = os.waitpid(pid, 0)
        tell(f"dead {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
