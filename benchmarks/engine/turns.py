"""What a turn costs late in a conversation: an agent whose every turn adds 100 tokens and gets 28.

The prefix cache begins each turn where the last one ended, so that only new tokens are computed; what grows is
attention over the history.
"""

import statistics
import tempfile
from pathlib import Path

import aiohttp
from meter import cpu_s
from servers import OURS, Server, random_ids, start_ours, wait_ready

NEW_PROMPT_TOKENS, SAMPLED_TOKENS = 100, 28
NUM_TURNS = 105
WINDOW = 5


async def measure(folder: Path, vocabulary: int, *, is_quick: bool) -> None:
    """CPU of turns 3 to 7 and of turns 98 to 102, one agent."""
    num_turns = 30 if is_quick else NUM_TURNS
    late = num_turns - WINDOW
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "engine.log"
        server = start_ours(folder, OURS, log, max_context=16_384)
        try:
            async with aiohttp.ClientSession() as client:
                await wait_ready(client, server, log)
                costs = await _converse(client, server, vocabulary, num_turns)
        finally:
            server.stop()
    early_s, late_s = statistics.median(costs[3:8]), statistics.median(costs[late - 2 : late + 3])
    print(
        f"\n{folder.name}: a turn of {NEW_PROMPT_TOKENS} + {SAMPLED_TOKENS} tokens: "
        f"turn 5 {1000 * early_s:.0f} CPU-ms, turn {late} {1000 * late_s:.0f}, ratio {late_s / early_s:.2f}",
        flush=True,
    )


async def _converse(client: aiohttp.ClientSession, server: Server, vocabulary: int, num_turns: int) -> list[float]:
    """CPU-seconds of every turn."""
    ids: list[int] = []
    costs: list[float] = []
    for number in range(num_turns):
        ids += random_ids(vocabulary, NEW_PROMPT_TOKENS)
        before_s = cpu_s(server.process.pid)
        async with client.post(server.url, json=server.body(number, ids, SAMPLED_TOKENS)) as answer:
            body = await answer.json()
        costs.append(cpu_s(server.process.pid) - before_s)
        ids += body["output_ids"]
    return costs
