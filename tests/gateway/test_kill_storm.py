"""A gateway process that is killed again and again under load and restarted on its ledger.

1. No answered turn is lost, whenever the kill falls: it is in the ledger with the tokens that its agent got, an
acknowledged end is an end, open sessions end as orphans, and `verify` finds no error. 2. The same holds for a worker's
shard, whose coordinator lives on, reads meanwhile and ends its orphans. Ten kills of each kind by default; 200 when
full.
"""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from areal_agent.ledger import questions
from areal_agent.ledger.files import shard_path
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.types import Status

from .zygote import ADMIN_KEY, MODEL

ZYGOTE = Path(__file__).with_name("zygote.py")
NUM_AGENTS = 8
MAX_ANSWERS_A_LIFE = 40
REWARD = 0.5

lives = pytest.mark.parametrize(
    "num_lives", [pytest.param(10, id="10 kills"), pytest.param(200, id="200 kills", marks=pytest.mark.full)]
)


class Zygote:
    """The warm parent of all gateways; one of them lives at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},  # it forks
        )

    async def live(self, kind: str, path: Path) -> str:
        """Start a gateway and return its address."""
        url = await asyncio.to_thread(self._ask, f"live {kind} {path}")
        assert url.startswith("http://"), url
        return url

    async def kill(self) -> None:
        assert await asyncio.to_thread(self._ask, "kill") == "dead"

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, command: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@dataclass(kw_only=True)
class Storm:
    """The answers that agents received, over all lives."""

    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the tokens of each completion
    sessions: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    moments: random.Random = field(default_factory=lambda: random.Random(0))

    async def life(self, zygote: Zygote, kind: str, path: Path) -> None:
        """From the birth of a gateway to its death, at some moment of its agents' work."""
        url = await zygote.live(kind, path)
        answered: asyncio.Queue[None] = asyncio.Queue()
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as agents:
            for _ in range(NUM_AGENTS):
                agents.create_task(self._agent(http, url, answered))
            for _ in range(self.moments.randint(1, MAX_ANSWERS_A_LIFE)):
                await answered.get()
            await zygote.kill()

    async def _agent(self, http: aiohttp.ClientSession, url: str, answered: "asyncio.Queue[None]") -> None:
        """One conversation after the other, until nobody answers any more."""

        async def call(path: str, key: str, **body: Any) -> Any:
            async with http.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        try:
            while True:
                session = await call("/rl/start_session", ADMIN_KEY, task_id="storm")
                id, key = session["session_id"], session["api_key"]
                self.sessions.add(id)
                messages: list[Any] = []
                for number in range(self.moments.randint(1, 4)):
                    messages.append({"role": "user", "content": f"question {number}"})
                    reply = await call(
                        "/v1/chat/completions", key, model=MODEL, messages=messages, return_token_ids=True
                    )
                    [choice] = reply["choices"]
                    self.answers[reply["id"]] = tuple(choice["token_ids"])
                    answered.put_nowait(None)
                    messages.append(choice["message"])
                await call("/rl/set_reward", key, reward=REWARD)
                await call("/rl/end_session", key)
                self.ended.add(id)
        except (aiohttp.ClientError, ConnectionError):
            return


async def check(ledger: Ledger, storm: Storm) -> None:
    """Everything that an agent was told is there."""
    trajectories = {id: await ledger.trajectory(id) for id in storm.sessions}
    recorded = {
        completion.id: completion.token_ids
        for trajectory in trajectories.values()
        for turn in trajectory.turns
        for completion in turn.completions
    }
    assert {id: recorded.get(id) for id in storm.answers} == storm.answers
    ends = {(trajectories[id].status, trajectories[id].rewards.final) for id in storm.ended}
    assert ends == {(Status.COMPLETED, REWARD)}
    assert {one.status for one in trajectories.values()} == {Status.COMPLETED, Status.ORPHAN}
    counts = await ledger.ask(questions.counts)
    assert counts.num_open == 0
    assert counts.num_closed >= len(storm.sessions)


@lives
async def test_no_answered_turn_is_lost(zygote: Zygote, tmp_path: Path, num_lives: int) -> None:
    path, storm = tmp_path / "ledger.sqlite", Storm()
    for _ in range(num_lives):
        await storm.life(zygote, "ledger", path)
    ledger = await Ledger.open(path, create=False)
    assert (await ledger.begin_incarnation(0)).number == num_lives
    await check(ledger, storm)
    await ledger.aclose()
    assert verify(path).violations == ()


@lives
async def test_no_answered_turn_of_a_workers_shard_is_lost(zygote: Zygote, tmp_path: Path, num_lives: int) -> None:
    path, storm = tmp_path / "ledger.sqlite", Storm()
    ledger = await Ledger.open(path, create=True)
    await ledger.begin_incarnation(0)
    num_orphans = 0
    for _ in range(num_lives):
        await storm.life(zygote, "shard", shard_path(path, "w0"))
        num_orphans += len(await ledger.end_orphans("w0"))
    await check(ledger, storm)
    assert (await ledger.ask(questions.counts)).drops == {"orphan": num_orphans}
    await ledger.aclose()
    assert verify(path).violations == ()
