"""The cost of a turn late in a conversation of one agent: each turn adds some tokens and samples some.

The prefix cache begins each turn where the last one ended, so that only new tokens are computed. What grows is
attention over the history: with its length for each sampled token, and with its length times the new ones for a prompt.
`without the cache` is the last turn again after a history that differs in its first token: all of it is computed.
"""

import statistics
import tempfile
from pathlib import Path

import aiohttp
from meter import cpu_s
from servers import OURS, Server, random_ids, start_ours, wait_ready

TURNS = ((32, 32), (100, 28))  # new prompt tokens, sampled tokens
NUM_TURNS = 105
WINDOW = 5
MAX_CONTEXT_TOKENS = 16_384


async def measure(folder: Path, vocabulary: int, *, is_quick: bool) -> None:
    """Measure the CPU of turns 3 to 7 and of turns 98 to 102, one agent at a time."""
    num_turns = 30 if is_quick else NUM_TURNS
    late = num_turns - WINDOW
    columns = [f"{folder.name}, CPU-ms a turn", "turn 5", f"turn {late}", "ratio", "without the cache"]
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "engine.log"
        server = start_ours(folder, OURS, log, max_context=MAX_CONTEXT_TOKENS)
        try:
            async with aiohttp.ClientSession() as client:
                await wait_ready(client, server, log)
                agent = Agent(client, server, vocabulary)
                for num_new, num_sampled in TURNS:
                    costs = [await agent.turn(num_new, num_sampled) for _ in range(num_turns)]
                    cold_s = await agent.turn_without_cache(num_sampled)
                    early_s = statistics.median(costs[3:8])
                    late_s = statistics.median(costs[late - 2 : late + 3])
                    cells = [f"{1000 * early_s:.0f}", f"{1000 * late_s:.0f}", f"{late_s / early_s:.2f}"]
                    cells = [f"{num_new} + {num_sampled} tokens", *cells, f"{1000 * cold_s:.0f}"]
                    print(f"| {' | '.join(cells)} |", flush=True)
                    agent.forget()
        finally:
            server.stop()


class Agent:
    """Holds one conversation after the other."""

    def __init__(self, client: aiohttp.ClientSession, server: Server, vocabulary: int) -> None:
        self._client = client
        self._server = server
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._num_requests = 0

    async def turn(self, num_new: int, num_sampled: int) -> float:
        """Play a turn; return the server's CPU-seconds."""
        self._ids += random_ids(self._vocabulary, num_new)
        cpu, output_ids = await self._ask(self._ids, num_sampled)
        self._ids += output_ids
        return cpu

    async def turn_without_cache(self, num_sampled: int) -> float:
        """Return the CPU-seconds of a turn after the same history with another first token."""
        cpu, _ = await self._ask([self._ids[0] % (self._vocabulary - 1) + 1, *self._ids[1:-num_sampled]], num_sampled)
        return cpu

    def forget(self) -> None:
        """Begin another conversation."""
        self._ids = []

    async def _ask(self, ids: list[int], num_sampled: int) -> tuple[float, list[int]]:
        self._num_requests += 1
        before_s = cpu_s(self._server.process.pid)
        async with self._client.post(
            self._server.url, json=self._server.body(self._num_requests, ids, num_sampled)
        ) as answer:
            body = await answer.json()
        return cpu_s(self._server.process.pid) - before_s, body["output_ids"]
