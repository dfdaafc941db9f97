"""Writes a small ledger as SQL text into tests/ledger/versions: `python -m tests.ledger.record`.

Run it once for every version of the tables, after raising `VERSION` in `areal_agent/ledger/files.py`, and commit the
result. Never write it again: test_versions.py reads what the code of that version really wrote.
"""

import asyncio
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from areal_agent.images import IMAGES, ImageFolder, reference_to
from areal_agent.ledger.encoding import StepRecord
from areal_agent.ledger.files import VERSION
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import LedgerShard
from areal_agent.types import Distribution, Drop, ImageSpan, Rewards, SessionPurpose, Status
from tests.ledger.make import SAMPLING, SPANS, Make

STEP = StepRecord(
    step=1,
    process=0,
    incarnation=0,
    sessions=("trained",),
    inputs={"token_ids": "ab" * 8},
    weights="cd" * 16,
    teacher=np.array([-0.5, -1.25], dtype=np.float32),
)


async def record(path: Path) -> None:
    """Record a session in every state, one with a fork and an image, and a shard with a closed and an open session."""
    make = Make()
    ledger = await Ledger.open(path, create=True)
    await ledger.begin_incarnation(0)
    await make.closed(ledger.own, "trained", "leased", "dropped", "waiting")
    await make.closed(ledger.own, "eval", purpose=SessionPurpose.EVAL)
    await ledger.own.open_session(make.session("forked"))
    await ledger.own.append_turn("forked", make.turn("forked", 0))
    fork = replace(make.completion("forked-c1"), versions=SPANS, distribution=Distribution.ALTERED)
    digest = ImageFolder(path.parent / IMAGES).keep(b"a picture")
    image = ImageSpan(digest=digest, start=1, end=2)
    asked = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, reference_to(digest)]}
    turn = make.turn(
        "forked", 1, parent="forked-c0", fork_at=5, completions=(fork,), sampling=SAMPLING, images=(image,),
        request_delta=(asked,),
    )  # fmt: skip
    await ledger.own.append_turn("forked", turn)
    rewards = Rewards(final=0.5, by_completion={"forked-c0": 0.25}, parts={"format": 1.0})
    ending = make.ending("forked", rewards=rewards, logged={"tries": 2}, undelivered=("forked-c1",))
    await ledger.own.close_session(ending)
    await ledger.own.open_session(make.session("unpaid", key_hash="cd" * 32))
    await ledger.own.append_turn("unpaid", make.turn("unpaid", 0))
    unpaid = make.ending("unpaid", rewards=Rewards(), status=Status.MISSING_REWARD, error="no reward")
    await ledger.own.close_session(unpaid)
    await make.leased(ledger, 1, "trained")
    await ledger.set_trainer(0, {"seed": 7})
    await ledger.record_step(STEP)
    await ledger.commit_checkpoint(1, "checkpoints/1")
    await make.leased(ledger, 2, "leased")
    await ledger.drop({"dropped": Drop.STALE})
    await ledger.own.open_session(make.session("open"))
    await ledger.own.append_turn("open", make.turn("open", 0))
    shard = await LedgerShard.open(ledger.shard_path("w0"), create=True)
    await make.closed(shard, "sharded")
    await shard.open_session(make.session("open in a shard"))
    await shard.append_turn("open in a shard", make.turn("open in a shard", 0))
    await shard.aclose()
    await ledger.aclose()


def dump(path: Path) -> str:
    connection = sqlite3.connect(path)
    pragmas = [
        f"PRAGMA {name} = {connection.execute(f'PRAGMA {name}').fetchone()[0]};"
        for name in ("application_id", "user_version", "journal_mode")
    ]
    text = "\n".join((*pragmas, *connection.iterdump(), ""))
    connection.close()
    return text


def main() -> None:
    target = Path(__file__).parent / "versions" / str(VERSION)
    target.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(record(Path(folder) / "ledger.sqlite"))
        for path in sorted(Path(folder).glob("*.sqlite")):
            (target / f"{path.stem}.sql").write_text(dump(path))
        shutil.copytree(Path(folder) / IMAGES, target / IMAGES)


if __name__ == "__main__":
    main()
