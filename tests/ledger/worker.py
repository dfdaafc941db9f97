"""A process that writes to a ledger until it is killed, started by test_crash.py. It prints every promise that it kept.

worker.py append LEDGER NAME          writes sessions side by side, and a line `turn ID` after each acknowledged turn
worker.py train  LEDGER POINT STEPS   rolls out, leases, "trains", publishes, commits; dies at its POINT-th commit
                                      point, or completes after STEPS (POINT 0: never)
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path

from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import Drop
from tests.ledger.make import Make


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


async def append(path: Path, name: str) -> None:
    ledger, make = await Ledger.open(path, create=True), Make()
    await ledger.begin_incarnation(0)

    async def agent(place: int) -> None:
        for number in itertools.count():
            session_id = f"{name}-{place}-{number}"
            await ledger.own.open_session(make.session(session_id))
            for turn in range(3):
                await ledger.own.append_turn(session_id, make.turn(session_id, turn))
                tell(f"turn {session_id}-t{turn}")
            await ledger.own.close_session(make.ending(session_id))
            tell(f"closed {session_id}")

    await asyncio.gather(*(agent(place) for place in range(8)))


class Mortal:
    """Counts commit points, and at the chosen one dies as if this process lost power."""

    def __init__(self, point: int) -> None:
        self._left = point

    def point(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def train(path: Path, point: int, num_steps: int) -> None:
    """Write checkpoints that list what the weights were trained on: the lineage with which the ledger must agree."""
    checkpoint = path.with_name("checkpoint.json")
    step, trained = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, [])
    ledger, make, mortal = await Ledger.open(path, create=True), Make(), Mortal(point)
    incarnation = await ledger.begin_incarnation(step)
    mortal.point()
    while step < num_steps:
        for place in range(3):
            await make.closed(ledger.own, f"i{incarnation.number}-step{step}-{place}")
            mortal.point()
        *batch, last = [one.session_id for one in await ledger.ask(questions.waiting)]
        await ledger.drop({last: Drop.STALE})
        mortal.point()
        step += 1
        await make.leased(ledger, step, *batch)
        mortal.point()
        trained += batch
        if step % 2 == 0 or step == num_steps:
            publish(checkpoint, step, trained)
            mortal.point()
            await ledger.commit_checkpoint(step, str(checkpoint))
            mortal.point()
    await ledger.set_note("status", "completed")
    await ledger.aclose()


def publish(checkpoint: Path, step: int, trained: list[str]) -> None:
    scratch = checkpoint.with_suffix(".tmp")
    scratch.write_text(json.dumps([step, trained]))
    scratch.replace(checkpoint)


if __name__ == "__main__":
    _, command, path, *rest = sys.argv
    if command == "append":
        asyncio.run(append(Path(path), rest[0]))
    else:
        asyncio.run(train(Path(path), int(rest[0]), int(rest[1])))
