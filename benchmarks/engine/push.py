"""The cost of a push while 16 requests are under way; weights come as in a run.

`write` is the trainer's part and `send` the engine's checksum, both while it samples; `stall` is from the first pause
to the last resume: `pause`, until no step is under way, `copy`, and `resume`. After it the keys and values of all
requests are recomputed.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from servers import OURS, Server, random_ids, start_ours, wait_ready
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_agent.cluster.local import weights_folder
from areal_agent.engine.client import HttpEngine
from areal_agent.types import GenerateRequest, SamplingParams, WeightVersion
from areal_agent.weights.channels import SharedMemoryChannel, layout
from areal_agent.weights.push import PushReport, push

NUM_REQUESTS = 16
NUM_PUSHES = 9
NUM_NEW_TOKENS = 1900
"""Tokens of a request, enough to be under way still when the last push is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The costs of some pushes, one entry per push, and the mean number of versions that sampled an answer."""

    writes_s: Sequence[float]
    reports: Sequence[PushReport]
    versions: float

    def median_ms(self, step: str) -> float:
        """Return the median of `write` or of a field of the report, given without its unit."""
        values = self.writes_s if step == "write" else [getattr(report, f"{step}_s") for report in self.reports]
        return 1000 * statistics.median(values)

    @property
    def worst_stall_ms(self) -> float:
        return 1000 * max(report.stall_s for report in self.reports)


async def measure(folder: Path, vocabulary: int, *, is_quick: bool) -> None:
    """Push over shared memory, on a CPU, and print the medians."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with weights_folder(in_memory=True) as place:
        channel = SharedMemoryChannel(place, layout(parameters.items(), torch.float32))
        log = place / "engine.log"
        server = start_ours(folder, OURS, log, max_context=2048)
        try:
            async with aiohttp.ClientSession() as client:
                await wait_ready(client, server, log)
            costs = await push_costs(server, channel, parameters, vocabulary, num_pushes=1 if is_quick else NUM_PUSHES)
        finally:
            server.stop()
            channel.close()
    num_bytes = sum(parameter.numel() * 4 for parameter in parameters.values())
    write, send, stall, pause, copy, resume = map(
        costs.median_ms, ("write", "send", "stall", "pause", "transfer", "resume")
    )
    print(
        f"\n{folder.name}: a push of {num_bytes / 1e6:.0f} MB with {NUM_REQUESTS} requests under way: "
        f"write {write:.1f} ms, send {send:.1f} ms while it samples, "
        f"stall {stall:.1f} ms (at most {costs.worst_stall_ms:.1f}): pause {pause:.1f}, copy {copy:.1f}, "
        f"resume {resume:.1f}; versions in an answer: {costs.versions:.1f}",
        flush=True,
    )


async def push_costs(
    server: Server,
    channel: SharedMemoryChannel,
    parameters: Mapping[str, Tensor],
    vocabulary: int,
    *,
    num_pushes: int,
    num_new_tokens: int = NUM_NEW_TOKENS,
) -> Costs:
    """Push versions 1, 2, ... into a server that serves, while requests are under way."""
    engine = HttpEngine(server.url.removesuffix("/generate"))
    requests = [
        GenerateRequest(
            request_id=f"{random.getrandbits(60):020}",
            input_ids=random_ids(vocabulary),
            sampling=SamplingParams(max_tokens=num_new_tokens),
        )
        for _ in range(NUM_REQUESTS)
    ]
    answers = [asyncio.create_task(engine.generate(request)) for request in requests]
    writes: list[float] = []
    reports: list[PushReport] = []
    try:
        for step in range(1, num_pushes + 1):
            await asyncio.sleep(0.3)
            started_s = time.perf_counter()
            weights = channel.write(parameters)
            writes.append(time.perf_counter() - started_s)
            reports.append(await push([engine], weights, WeightVersion(step=step)))
        for request in requests:
            await engine.abort(request.request_id)
        results = await asyncio.gather(*answers)
    finally:
        for answer in answers:
            answer.cancel()  # harmless when it is done
        await engine.aclose()
    versions = statistics.fmean(len(result.versions) for result in results)
    return Costs(writes_s=writes, reports=reports, versions=versions)
