"""A process that trains on a ledger until it is killed, started by test_crash.py: `worker.py LEDGER POINT STEPS`.

It rolls out, leases, "trains", publishes and commits. It dies at its POINT-th commit point, or completes after STEPS if
POINT is 0.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import Drop
from tests.ledger.make import Make


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
    asyncio.run(train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
