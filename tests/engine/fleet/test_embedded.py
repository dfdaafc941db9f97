"""Fleets of real engine processes, of which one is killed or stopped in the middle of answers.

- the answers equal those of one undisturbed engine, token for token, greedy and with a seed, over HTTP too
- a frozen server (SIGSTOP) is told from a slow one, and its answers go on elsewhere; after SIGCONT it serves again,
  with the weights that it missed
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberState, Patience
from areal_agent.types import TokenChunk, WeightVersion
from areal_agent.weights.push import push

DEADLINE_S = 300.0  # only a hang is longer
LENGTH = 480  # tokens: still being sampled when the signal comes


class Process:
    """An engine process."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._announcement = folder / "url"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "areal_agent.engine", "--model", str(model), "--device", "cpu"),
                *("--max-context", "512", "--announce", str(self._announcement)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def url(self) -> str:
        while not self._announcement.exists():
            assert self.process.poll() is None
            await asyncio.sleep(0.05)
        return self._announcement.read_text()


class Pair:
    """Two engine processes, which take seconds to start, so tests share them until one of them has ended."""

    def __init__(self, model: Path, make_folder: Callable[[], Path]) -> None:
        self._model = model
        self._make_folder = make_folder
        self._processes: list[Process] = []

    def alive(self) -> Sequence[Process]:
        if not self._processes or any(one.process.poll() is not None for one in self._processes):
            self.end()
            self._processes = [Process(self._model, self._make_folder()) for _ in range(2)]
        return self._processes

    def end(self) -> None:
        for one in self._processes:
            one.process.kill()
            one.process.wait()


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tiny, lambda: tmp_path_factory.mktemp("engine"))
    try:
        yield pair
    finally:
        pair.end()


@pytest.fixture
def processes(pair: Pair) -> Sequence[Process]:
    return pair.alive()


@pytest.fixture
async def engines(processes) -> AsyncGenerator[tuple[Fleet, dict[str, Process]]]:
    async with asyncio.timeout(DEADLINE_S):
        by_url = {await one.url(): one for one in processes}
        patience = Patience(
            hung_after_s=2.0, probe_every_s=0.1, probe_timeout_s=1.0, wait_s=DEADLINE_S, max_failures=99
        )
        async with contextlib.aclosing(Fleet(by_url, HttpEngine, patience=patience)) as fleet:
            await fleet.info()
            yield fleet, by_url


def busy_url(fleet: Fleet) -> str:
    return next(one.url for one in fleet.report() if one.num_requests)


async def expected(url: str, requests: list) -> list[tuple[int, ...]]:
    async with contextlib.aclosing(HttpEngine(url)) as engine:
        return [(await engine.generate(request)).token_ids for request in requests]


class Arrivals:
    """Waits until so many tokens of each request have come."""

    def __init__(self, num_requests: int, num_tokens: int) -> None:
        self._missing = dict.fromkeys(range(num_requests), num_tokens)
        self.are_there = asyncio.Event()

    def of(self, number: int):
        def take(chunk: TokenChunk) -> None:
            self._missing[number] -= len(chunk.token_ids)
            if all(missing <= 0 for missing in self._missing.values()):
                self.are_there.set()

        return take


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_answers_are_those_of_an_engine_that_nobody_killed(engines, ask, blow, share, other):
    fleet, by_url = engines
    served = (await fleet.info()).weight_version
    requests = [ask(n, max_tokens=LENGTH, temperature=n % 2 * 1.0) for n in range(4)]
    truth = await expected(next(iter(by_url)), requests)
    arrivals = Arrivals(len(requests), 3)
    answers = [asyncio.ensure_future(fleet.generate(r, arrivals.of(n))) for n, r in enumerate(requests)]
    await arrivals.are_there.wait()
    victim = busy_url(fleet)
    by_url[victim].process.send_signal(blow)
    results = await asyncio.gather(*answers)
    assert [result.token_ids for result in results] == truth
    assert [(span.version, span.start, span.end) for result in results for span in result.versions] == [
        (served, 0, LENGTH)
    ] * len(requests)
    if blow is signal.SIGSTOP:
        new = WeightVersion(step=served.step + 1)
        await push([fleet], share(other), new)
        by_url[victim].process.send_signal(signal.SIGCONT)
        while any(one.state is not MemberState.SERVING or one.version != new for one in fleet.report()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
