"""The embedded engine on a GPU, in one command: tokens per second and steps beside transformers' and a floor; pushes.

    python benchmarks/engine/gpu.py [--shapes 135M 0.6B 1.7B] [--device cuda] [--requests 1 64 512] [--rounds 2]
    python benchmarks/engine/gpu.py --shapes tiny --device cpu                           # the same code on a CPU

The models have random weights of Qwen3's shapes and of SmolLM2's, in bfloat16 on a GPU. Each request has 128 prompt and
128 sampled tokens; a last batch has long prompts. Each batch is sent over HTTP to a server of its own, which has slots
for just these requests; `start` is until that answers. Tokens per second are the median of some rounds by the clock,
prompts included, after as many rounds that warm up. A step is the time between two events of one request of a batch,
which is streamed; those of all rounds count, so that `longest` may be one of a new shape. Then pushes are timed over
shared memory, with this process as the trainer. Each figure is printed as soon as it is there. Failures are printed,
and the rest goes on; the exit code is then 1.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import torch
from gpu_floor import Batch, DeviceRates, named
from model import GPU_SHAPES, SHAPES, Shape, build_weights
from push import NUM_REQUESTS, Costs, push_costs
from servers import OURS, NotServing, Server, random_ids, start_ours, wait_ready
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_agent.cluster.local import weights_folder
from areal_agent.errors import EngineError
from areal_agent.process import ENDING_WITH_US
from areal_agent.weights.channels import SharedMemoryChannel, layout

ALL_SHAPES = {"tiny": SHAPES["tiny"]} | GPU_SHAPES
GENERATE_S = 300.0
PUSH_CONTEXT = 4096
"""Long enough for requests that outlast all pushes."""
PUSH_STEPS = ("write", "send", "stall", "pause", "transfer", "resume")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The measurements of one shape."""

    name: str
    shape: Shape
    folder: Path
    device: torch.device
    batches: Sequence[Batch]
    rounds: int
    num_pushes: int
    with_generate: bool
    faults: list[str] = field(default_factory=list[str])

    def fail(self, fault: str) -> None:
        """Print a fault, and keep it."""
        print(fault, flush=True)
        self.faults.append(fault)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/engine/gpu.py", description="The engine on a GPU.")
    parser.add_argument("--shapes", nargs="+", choices=tuple(ALL_SHAPES), default=list(GPU_SHAPES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", nargs="+", type=int, help="at once (default: 1 64 512; tiny: 1 4)")
    parser.add_argument("--long", type=int, help="prompt tokens of the last batch (default: 4096; tiny: 256; 0: none)")
    parser.add_argument("--rounds", type=int, default=2, help="of which the median is told (default %(default)s)")
    parser.add_argument("--pushes", type=int, default=5, help="how many, or 0 (default %(default)s)")
    parser.add_argument("--without-generate", action="store_true", help="leave transformers out")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    print(named(device), flush=True)
    has_failed = False
    for name in args.shapes:
        few = name == "tiny"
        batches = [
            Batch(requests=number, prompt_tokens=128, new_tokens=128)
            for number in args.requests or ((1, 4) if few else (1, 64, 512))
        ]
        if long_tokens := (256 if few else 4096) if args.long is None else args.long:
            batches.append(Batch(requests=min(16, batches[-1].requests), prompt_tokens=long_tokens, new_tokens=128))
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(
                name=name,
                shape=ALL_SHAPES[name],
                folder=Path(folder) / name,
                device=device,
                batches=batches,
                rounds=args.rounds,
                num_pushes=args.pushes,
                with_generate=not args.without_generate,
            )
            build_weights(plan.shape, plan.folder, device=device, dtype=plan.dtype)
            asyncio.run(measure(plan))
            has_failed |= bool(plan.faults)
    return int(has_failed)


async def measure(plan: Plan) -> None:
    """Print one table of rates and one of pushes."""
    rates = DeviceRates.of(plan.device, plan.dtype)
    _give_back(plan.device)
    print(
        f"\na copy reads and writes {rates.bytes_per_s / 1e9:.0f} GB/s, a product does {rates.flops / 1e12:.1f} TFLOP/s"
    )
    columns = [f"{plan.name}, requests", *("tokens each", "side", "tokens/s", "to floor")]
    columns += ["ms a step", "longest", "start, s"]
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for batch in plan.batches:
        floor = _rate(batch, rates.floor_s(plan.shape, batch, plan.dtype))
        print_rate(batch, "floor", floor, floor, f"{rates.step_s(plan.shape, batch, plan.dtype) * 1000:.2f}")
        try:
            started_s = time.perf_counter()
            async with serving(plan, batch.requests, batch.prompt_tokens + batch.new_tokens) as server:
                start_s = time.perf_counter() - started_s
                rate, steps_s = await served_rate(plan, server, batch)
                steps = (f"{1000 * of(steps_s):.2f}" for of in (statistics.median, max))
                print_rate(batch, "ours", rate, floor, *steps, f"{start_s:.1f}")
        except NotServing as error:
            plan.fail(f"ours failed with {batch.requests} requests: {error}")
        if plan.with_generate and (rate := generate_rate(plan, batch)):
            print_rate(batch, "generate", rate, floor)
    if not plan.num_pushes:
        return
    try:
        async with serving(plan, NUM_REQUESTS, PUSH_CONTEXT) as server:
            print_pushes(plan.name, await push_all(plan, server))
    except (NotServing, EngineError) as error:
        plan.fail(f"pushes failed: {error}")


def print_rate(batch: Batch, side: str, rate: float, floor: float, *steps: str) -> None:
    tokens = f"{batch.prompt_tokens} + {batch.new_tokens}"
    cells = [str(batch.requests), tokens, side, f"{rate:.0f}", f"{rate / floor:.3f}", *steps, *[""] * (3 - len(steps))]
    print(f"| {' | '.join(cells)} |", flush=True)


def print_pushes(name: str, costs: Costs) -> None:
    columns = [f"{name}, push, {NUM_REQUESTS} requests under way, ms", *PUSH_STEPS, "stall at most"]
    cells = [f"{costs.median_ms(step):.1f}" for step in PUSH_STEPS]
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    print(f"| {' | '.join(['shared memory', *cells, f'{costs.worst_stall_ms:.1f}'])} |", flush=True)


@asynccontextmanager
async def serving(plan: Plan, num_requests: int, max_context: int) -> AsyncGenerator[Server]:
    """The engine, with room for so many requests at once."""
    log = plan.folder / "engine.log"
    options = ["--device", plan.device.type, "--max-running", str(num_requests)]
    server = start_ours(plan.folder, OURS, log, max_context=max_context, options=options)
    try:
        async with aiohttp.ClientSession() as client:
            await wait_ready(client, server, log)
        yield server
    finally:
        server.stop()


async def served_rate(plan: Plan, server: Server, batch: Batch) -> tuple[float, list[float]]:
    """Return tokens per second, and the seconds of the steps of all rounds. Raises NotServing."""
    times: list[float] = []
    steps_s: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client:
        for _ in range(2 * plan.rounds):
            bodies = [
                server.body(
                    time.time_ns() % 10**9 * 1000 + number,
                    random_ids(plan.shape.vocabulary, batch.prompt_tokens),
                    batch.new_tokens,
                )
                for number in range(batch.requests)
            ]
            bodies[-1]["stream"] = True  # its prompt comes last, so most of its steps are beside no other prompt
            started_s = time.perf_counter()
            *_, events_s = await asyncio.gather(*(_ask(client, server, body) for body in bodies))
            times.append(time.perf_counter() - started_s)
            steps_s += [after - before for before, after in pairwise(events_s)]
    return _rate(batch, statistics.median(times[plan.rounds :])), steps_s


async def _ask(client: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> list[float]:
    """Return when each part of the answer came, by the clock."""
    try:
        async with client.post(server.url, json=body) as answer:
            if answer.status != 200:
                raise NotServing(f"{server.url} answered {answer.status}: {(await answer.text())[:500]}")
            return [time.perf_counter() async for _ in answer.content.iter_any()]
    except aiohttp.ClientError as error:
        raise NotServing(f"{server.url} broke off: {error!r}") from error


def generate_rate(plan: Plan, batch: Batch) -> float:
    """Return tokens per second by transformers; 0 when it failed."""
    script = str(Path(__file__).parent / "gpu_generate.py")
    numbers = (batch.requests, batch.prompt_tokens, batch.new_tokens, plan.rounds)
    try:
        done = subprocess.run(
            [*ENDING_WITH_US, sys.executable, script, str(plan.folder), str(plan.device), *map(str, numbers)],
            capture_output=True,
            text=True,
            timeout=GENERATE_S,
        )
    except subprocess.TimeoutExpired:
        plan.fail(f"generate gave nothing within {GENERATE_S:.0f} s")
        return 0.0
    if done.returncode:
        plan.fail(f"generate failed:\n{done.stderr}")
        return 0.0
    return statistics.median(map(float, done.stdout.split()))


async def push_all(plan: Plan, server: Server) -> Costs:
    """Measure pushes over shared memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(plan.folder, dtype=torch.float32)
    parameters: dict[str, Tensor] = dict(model.to(plan.device).named_parameters())
    with weights_folder(in_memory=True) as place:
        channel = SharedMemoryChannel(place, layout(parameters.items(), plan.dtype))
        try:
            return await push_costs(
                server,
                channel,
                parameters,
                plan.shape.vocabulary,
                num_pushes=plan.num_pushes,
                num_new_tokens=PUSH_CONTEXT - 256,
            )
        finally:
            channel.close()


def _give_back(device: torch.device) -> None:
    """Free memory that this process no longer needs, for the processes that it starts."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _rate(batch: Batch, seconds: float) -> float:
    return batch.requests * batch.new_tokens / seconds


if __name__ == "__main__":
    sys.exit(main())
