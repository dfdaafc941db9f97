"""Plants defects in the product, one at a time, and lets the storm look for each: prints how it was found.

A helper of tests: `python tests/storm/planted.py DEFECT:FIRST_SEED ...`.
"""

from areal_agent.storm import CLOCKS  # first: it replaces the clocks that the product keeps

# isort: split
import asyncio
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from areal_agent.cluster.ray_hosts import RemoteStarter, Starter
from areal_agent.errors import LedgerError
from areal_agent.gateway.turn import TurnLog
from areal_agent.ledger.encoding import CompletionRow, EndingRow, TurnRow
from areal_agent.ledger.shard import LedgerShard
from areal_agent.rollout import producer
from areal_agent.rollout.worker import WorkerServer
from areal_agent.run.run import Run
from areal_agent.staleness import Admission
from areal_agent.storm.__main__ import FAULTS_A_STORY, apart
from areal_agent.storm.faults import draw_faults
from areal_agent.storm.story import tell
from areal_agent.types import RolloutBatch, TokenRecord

MAX_FAULTS = 2000
"""In which a defect has to be found."""


def acknowledged_before_the_commit() -> None:
    """A turn is answered before it is durable; its session ends after it is."""
    writing: defaultdict[LedgerShard, list[asyncio.Task[None]]] = defaultdict(list)
    append, close = LedgerShard.append_rows, LedgerShard.close_with

    async def append_later(shard: LedgerShard, session: str, turn: TurnRow, rows: Sequence[CompletionRow]) -> None:
        async def write() -> None:
            await asyncio.sleep(0.01)
            await append(shard, session, turn, rows)

        writing[shard].append(asyncio.create_task(write()))

    async def close_after(shard: LedgerShard, session: str, ending: EndingRow) -> None:
        await asyncio.gather(*writing[shard])
        await close(shard, session, ending)

    LedgerShard.append_rows, LedgerShard.close_with = append_later, close_after  # type: ignore[method-assign]


def capacity_returned_twice() -> None:
    """A group that failed as a whole gives its capacity back twice."""
    give_back = Admission.give_back_running

    def twice(admission: Admission, group_size: int) -> None:
        give_back(admission, group_size)
        give_back(admission, group_size)

    Admission.give_back_running = twice  # type: ignore[method-assign]


def stale_version_accepted() -> None:
    """What is beyond the bound is trained."""
    producer.is_stale = lambda *_: False  # type: ignore[assignment]


def _records_are(change: Callable[[Sequence[TokenRecord]], Sequence[TokenRecord]]) -> None:
    take = producer.Producer.take

    async def changed(own: producer.Producer, *given: Any) -> RolloutBatch:
        batch = await take(own, *given)
        return replace(batch, records=tuple(change(batch.records)))

    producer.Producer.take = changed  # type: ignore[method-assign]


def twice_in_a_step() -> None:
    """Every record is in its batch twice."""
    _records_are(lambda records: [*records, *records])


def altered_tokens() -> None:
    """The first token of each loss is another one than was sampled."""

    def altered(record: TokenRecord) -> TokenRecord:
        return replace(
            record,
            token_ids=np.where(np.arange(len(record.token_ids)) == record.loss_mask.argmax(), 1, record.token_ids),
        )

    _records_are(lambda records: [altered(one) for one in records])


def _fails(owner: type, name: str, every: int, error: Exception) -> None:
    method, calls = getattr(owner, name), itertools.count(1)

    def fails(*given: Any, **named: Any) -> Any:
        if next(calls) % every == 0:
            raise type(error)(*error.args)  # a new one: the same would be its own context
        return method(*given, **named)

    setattr(owner, name, fails)


def a_worker_fails() -> None:
    _fails(WorkerServer, "_start", 20, AssertionError("planted"))


def a_gateway_fails() -> None:
    """It answers with 500, now and then."""
    _fails(TurnLog, "place", 20, KeyError("planted"))


def a_run_ends() -> None:
    """A run ends with an error that nothing explains."""
    _fails(Run, "push", 3, LedgerError("planted"))


def a_loss_unnoticed() -> None:
    """Nobody is told that a node is gone."""
    ask = RemoteStarter.ask

    async def ask_for_ever(starter: RemoteStarter, *given: Any, **named: Any) -> Any:
        try:
            return await ask(starter, *given, **named)
        except OSError:
            return await asyncio.get_running_loop().create_future()

    RemoteStarter.ask = ask_for_ever  # type: ignore[method-assign]


def room_not_given_back() -> None:
    """A starter is kept once its process has ended."""
    RemoteStarter.release = lambda _: None  # type: ignore[method-assign]


def a_lease_without_end() -> None:
    """A process goes on after another one was started for it elsewhere."""

    async def for_ever(starter: Starter, lease_s: float) -> None:
        await asyncio.get_running_loop().create_future()

    Starter._end_when_cut_off = for_ever  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        acknowledged_before_the_commit,
        capacity_returned_twice,
        stale_version_accepted,
        twice_in_a_step,
        altered_tokens,
        a_worker_fails,
        a_gateway_fails,
        a_run_ends,
        a_loss_unnoticed,
        room_not_given_back,
        a_lease_without_end,
    )
}


def story(defect: str, seed: int) -> Sequence[str]:
    DEFECTS[defect]()
    return tell(seed, draw_faults(seed, FAULTS_A_STORY)).broken


def find(wanted: str) -> Sequence[str]:
    """Return the promises that the first story breaks in which a defect is found; nothing if there is none."""
    defect, _, first = wanted.partition(":")
    stories = (apart(story, defect, int(first) + number) for number in range(MAX_FAULTS // FAULTS_A_STORY))
    return next(filter(None, stories), ())


def main(*wanted: str) -> None:
    with ThreadPoolExecutor(2) as threads:
        print(json.dumps(list(threads.map(find, wanted))))


if __name__ == "__main__":
    assert CLOCKS
    main(*sys.argv[1:])
