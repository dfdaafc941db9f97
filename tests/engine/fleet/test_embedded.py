"""A fleet of two real engine processes, disturbed in the middle of answers.

- the answers equal those of one undisturbed engine, token for token, greedy and with a seed, over HTTP too
- a frozen server (SIGSTOP) is told from a slow one, and its answers go on elsewhere; after SIGCONT it serves again,
  with the weights that it missed
- one that is killed or ended is left; the last one, told to end, lets its requests end first, queued and paused or not
"""

import asyncio
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import aclosing

import pytest

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberState, Patience
from areal_agent.types import FinishReason, PauseMode, TokenChunk, WeightVersion
from areal_agent.weights.push import push
from tests.engine.test_process import process, url_of

DEADLINE_S = 300.0  # only a hang is longer
LENGTH = 480  # tokens: still being sampled when the signal comes
PATIENCE = Patience(hung_after_s=2.0, probe_every_s=0.1, probe_timeout_s=1.0, wait_s=DEADLINE_S, max_failures=99)


class Arrivals:
    """Waits until three tokens of each request have come."""

    def __init__(self, num_requests: int) -> None:
        self._missing = dict.fromkeys(range(num_requests), 3)
        self.are_there = asyncio.Event()

    def of(self, number: int):
        def take(chunk: TokenChunk) -> None:
            self._missing[number] -= len(chunk.token_ids)
            if all(missing <= 0 for missing in self._missing.values()):
                self.are_there.set()

        return take


async def disturb(fleet: Fleet, by_url: Mapping[str, Process], blow: signal.Signals, ask) -> str:
    """Send a signal to one of the servers that answer, check the answers, and return the server."""
    served = (await fleet.info()).weight_version
    requests = [ask(number, max_tokens=LENGTH, temperature=number % 2 * 1.0) for number in range(4)]
    async with aclosing(HttpEngine(next(iter(by_url)))) as engine:
        truth = [(await engine.generate(request)).token_ids for request in requests]
    arrivals = Arrivals(len(requests))
    answers = [asyncio.ensure_future(fleet.generate(one, arrivals.of(n))) for n, one in enumerate(requests)]
    await arrivals.are_there.wait()
    victim = next(one.url for one in fleet.report() if one.num_requests)
    by_url[victim].send_signal(blow)
    results = await asyncio.gather(*answers)
    assert [result.token_ids for result in results] == truth
    spans = [(span.version, span.start, span.end) for result in results for span in result.versions]
    assert spans == [(served, 0, LENGTH)] * len(requests)
    return victim


@pytest.mark.slow
@pytest.mark.parametrize("last", [signal.SIGKILL, signal.SIGTERM])
async def test_answers_are_those_of_an_engine_that_nobody_killed(last, tiny, other, ask, share):
    """One test, because engines take seconds to start."""
    new = WeightVersion(step=1)
    async with asyncio.timeout(DEADLINE_S), process(tiny) as one, process(tiny) as two:
        by_url = {await url_of(child): child for child in (one, two)}
        async with aclosing(Fleet(by_url, HttpEngine, patience=PATIENCE)) as fleet:
            frozen = await disturb(fleet, by_url, signal.SIGSTOP, ask)
            await push([fleet], share(other), new)
            by_url[frozen].send_signal(signal.SIGCONT)
            while any((one.state, one.version) != (MemberState.SERVING, new) for one in fleet.report()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            (survivor,) = by_url.keys() - {await disturb(fleet, by_url, last, ask)}
        async with aclosing(HttpEngine(survivor)) as engine:
            await engine.pause(PauseMode.RETRACT)
            answers = [asyncio.create_task(engine.generate(ask(number, max_tokens=200))) for number in range(3)]
            while (await engine.stats()).num_queued < 3:
                pass
            by_url[survivor].send_signal(signal.SIGTERM)
            ends = [(one.finish_reason, len(one.token_ids)) for one in await asyncio.gather(*answers)]
        assert ends == [(FinishReason.LENGTH, 200)] * 3
        assert await by_url[survivor].wait() == 0
