"""What a push costs: 16 requests are under way, weights come through shared memory, as in a run.

`write` is the trainer's part and `send` the engine's checksum, both beside sampling; `stall` is from the first pause to
the last resume: `pause`, until no step is under way, `copy`, and `resume`. After it the keys and values of all requests
are computed again.
"""

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from servers import OURS, random_ids, start_ours, wait_ready
from transformers import AutoModelForCausalLM

from areal_agent.cluster.local import weights_folder
from areal_agent.engine.http import HttpEngine
from areal_agent.engine_types import GenerateRequest
from areal_agent.types import SamplingParams, WeightVersion
from areal_agent.weights.push import PushReport, push
from areal_agent.weights.shared_memory import SharedMemoryChannel, layout

NUM_REQUESTS = 16
NUM_PUSHES = 9


async def measure(folder: Path, vocabulary: int, *, is_quick: bool) -> None:
    """Print the medians."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with weights_folder(in_memory=True) as place:
        channel = SharedMemoryChannel(place, layout(parameters.items(), torch.float32))
        log = place / "engine.log"
        server = start_ours(folder, OURS, log, max_context=2048)
        engine = HttpEngine(server.url.removesuffix("/generate"))
        try:
            async with aiohttp.ClientSession() as client:
                await wait_ready(client, server, log)
            sampling = SamplingParams(max_tokens=1900)
            requests = [
                GenerateRequest(
                    request_id=f"{random.getrandbits(60):020}", input_ids=random_ids(vocabulary), sampling=sampling
                )
                for _ in range(NUM_REQUESTS)
            ]
            answers = [asyncio.create_task(engine.generate(request)) for request in requests]
            writes: list[float] = []
            reports: list[PushReport] = []
            for step in range(1, 2 if is_quick else NUM_PUSHES + 1):
                await asyncio.sleep(0.3)
                started_s = time.perf_counter()
                weights = channel.write(parameters)
                writes.append(time.perf_counter() - started_s)
                reports.append(await push([engine], weights, WeightVersion(step=step)))
            for request in requests:
                await engine.abort(request.request_id)
            results = await asyncio.gather(*answers)
        finally:
            await engine.aclose()
            server.stop()
            channel.close()
    num_bytes = sum(parameter.numel() * 4 for parameter in parameters.values())
    steps = ("send_s", "stall_s", "pause_s", "transfer_s", "resume_s")
    send, stall, pause, copy, resume = (
        1000 * statistics.median(getattr(report, step) for report in reports) for step in steps
    )
    worst = 1000 * max(report.stall_s for report in reports)
    print(
        f"\n{folder.name}: a push of {num_bytes / 1e6:.0f} MB with {NUM_REQUESTS} requests under way: "
        f"write {1000 * statistics.median(writes):.1f} ms, send {send:.1f} ms while it samples, "
        f"stall {stall:.1f} ms (at most {worst:.1f}): pause {pause:.1f}, copy {copy:.1f}, resume {resume:.1f}; "
        f"versions in an answer: "
        f"{statistics.fmean(len(result.versions) for result in results):.1f}",
        flush=True,
    )
