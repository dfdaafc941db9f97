"""The cost of a turn in the gateway with everything on: sessions, ledger, branches, tool calls.

    python benchmarks/gateway [--quick] [--only NAME ...]

The engine is a stub of zero delay (`engine.py`), the agents' conversations are many turns long (`agents.py`), the
tokenizer is a real byte-level BPE (`model.py`). The gateway under test, `python -m areal_agent.gateway`, is pinned to
one core; engine and agents have the others. CPU is that of all its threads. Two simpler gateways (`references.py`) run
beside it for comparison. On a machine that others use, too, `--only instructions` tells more than CPU times: it counts
a turn's instructions by callgrind (Debian's valgrind), system calls excluded. Linux only.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import model
from agents import PROTOCOLS, Agent
from meter import CpuBound, InstructionCounter, cpu_ns, pin, resident_bytes, stop

from areal_agent.process import ENDING_WITH_US

HERE = Path(__file__).parent
ADMIN_KEY = "benchmark"
READY_S = 300.0  # under callgrind everything takes many times as long
GATEWAY_CORE = 0
IDLE_S = 20.0
MEMORY_SETTLES_S = 8.0  # the gateway returns free memory a few seconds after turns


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The files and addresses that all measurements share."""

    folder: Path
    text: str
    engine_url: str
    slow_engine_url: str  # takes one second per request

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A running gateway."""

    process: subprocess.Popen[bytes]
    base_url: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/gateway", description="CPU of a turn in the gateway.")
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}")
    args = parser.parse_args()
    names = args.only or list(MEASUREMENTS)
    if unknown := set(names) - set(MEASUREMENTS):
        parser.error(f"no measurement {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    _raise_file_limit()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), names, is_quick=args.quick))
    return 0


async def measure(folder: Path, names: Sequence[str], *, is_quick: bool) -> None:
    tokenizer = model.build_tokenizer(folder / "tokenizer")
    (folder / "answers.json").write_text(json.dumps(model.answers(tokenizer, 64)))
    fast, fast_url = _start(folder, "engine.py", "--answers", str(folder / "answers.json"))
    slow, slow_url = _start(folder, "engine.py", "--answers", str(folder / "answers.json"), "--delay-s", "1")
    pin(os.getpid(), _other_cores())
    text = " ".join("\n".join(model.library_texts()).split())
    world = World(folder=folder, text=text, engine_url=fast_url, slow_engine_url=slow_url)
    try:
        for name in names:
            await MEASUREMENTS[name](world, is_quick)
    finally:
        stop(fast)
        stop(slow)


# ------------------------------------------------------------------------------------------------- measurements


async def cpu(world: World, is_quick: bool) -> None:
    """Measure the CPU per turn at 32 agents and 16 turns, and over 128 turns: early against late."""
    print("\n| | CPU ms, S32 T16 | CPU ms, T128 | turns 118-128 over 1-10 |\n|---|---|---|---|", flush=True)
    rounds = 1 if is_quick else 3
    for kind in ("areal_agent", "floor", "retokenise"):
        short: list[float] = []
        long: list[float] = []
        ratios: list[float] = []
        for _ in range(rounds):
            async with open_side(world, kind) as side, load(world, side, 32) as agents:
                await play(agents[:8], 4)  # warms up
                for agent in agents:
                    await agent.start()
                short.append(await cpu_of_turns(side, agents, 16))
            num_turns, num_agents = (128, 8) if not is_quick else (32, 4)
            if kind == "retokenise":
                num_agents = 2
            async with open_side(world, kind) as side, load(world, side, num_agents) as agents:
                await play(agents, 2)
                for agent in agents:
                    await agent.start()
                early = await cpu_of_turns(side, agents, 10)
                middle = await cpu_of_turns(side, agents, num_turns - 21)
                late = await cpu_of_turns(side, agents, 11)
                long.append((10 * early + (num_turns - 21) * middle + 11 * late) / num_turns)
                ratios.append(late / early)
        figures = (statistics.median(figure) for figure in (short, long, ratios))
        print(f"| {kind} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)


async def instructions(world: World, is_quick: bool) -> None:
    """Count the instructions of a turn in user space at 8 agents and 16 turns, and over 128 turns.

    Those of an idle gateway in the same time are not a turn's: it probes its engine every 5 s, and turns take 50 times
    as long under callgrind.
    """
    if not InstructionCounter.is_possible():
        print("\nInstructions: not counted, there is no valgrind")
        return
    print("\n| | millions of instructions, S8 T16 | S2 T128 |\n|---|---|---|", flush=True)
    for name in (*PROTOCOLS, "floor"):
        sizes = ((2, 4), (2, 8)) if is_quick else ((8, 16), (2, 128))
        figures = [await _instructions_of_turns(world, name, *size) / 1e6 for size in sizes]
        print(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)


async def _instructions_of_turns(world: World, name: str, num_agents: int, num_turns: int) -> float:
    counter = InstructionCounter(Path(tempfile.mkdtemp(dir=world.folder)))
    kind = "areal_agent" if name in PROTOCOLS else name
    async with (
        open_side(world, kind, core=None, under=counter.command) as side,
        load(world, side, num_agents, name) as agents,
    ):
        await play(agents, 4)  # warms up
        for agent in agents:
            await agent.start()
        counter.start(side.process.pid)
        started_s = time.monotonic()
        await play(agents, num_turns)
        took_s = time.monotonic() - started_s
        in_all = counter.stop(side.process.pid)
        counter.start(side.process.pid)
        await asyncio.sleep(IDLE_S)
        idle = counter.stop(side.process.pid) / IDLE_S * took_s
        return (in_all - idle) / (num_turns * num_agents)


async def protocols(world: World, is_quick: bool) -> None:
    """Measure the CPU per turn of each protocol at 32 agents and 16 turns, and over 128 turns; rounds interleave."""
    print("\n| | S32 T16, ratio to chat | ratio to the floor | T128, ratio to chat |\n|---|---|---|---|", flush=True)
    names = [*PROTOCOLS, "floor"]
    short, long = await _interleaved(world, names, 32, 16, is_quick), await _interleaved(world, names, 8, 128, is_quick)

    def ratio(figures: dict[str, list[float]], name: str, base: str) -> float:
        return statistics.median(one / other for one, other in zip(figures[name], figures[base], strict=True))

    for name in PROTOCOLS:
        ratios = (ratio(short, name, "chat"), ratio(short, name, "floor"), ratio(long, name, "chat"))
        print(f"| {name} | " + " | ".join(f"{one:.2f}" for one in ratios) + " |", flush=True)


async def _interleaved(
    world: World, names: Sequence[str], num_agents: int, num_turns: int, is_quick: bool
) -> dict[str, list[float]]:
    """Return the CPU milliseconds per turn of each round, with a gateway for each name open all the time."""
    figures: dict[str, list[float]] = {name: [] for name in names}
    async with AsyncExitStack() as stack:
        loads: dict[str, tuple[Side, list[Agent]]] = {}
        for name in names:
            side = await stack.enter_async_context(open_side(world, "areal_agent" if name in PROTOCOLS else name))
            agents = await stack.enter_async_context(load(world, side, num_agents, name))
            await play(agents[:8], 4)  # warms up
            loads[name] = side, agents
        for _ in range(1 if is_quick else 5):
            for name, (side, agents) in loads.items():
                for agent in agents:
                    await agent.start()
                figures[name].append(await cpu_of_turns(side, agents, num_turns))
    return figures


async def latency(world: World, is_quick: bool) -> None:
    """Measure what the gateway adds to a turn of one agent alone, network and stub engine included."""
    print("\n| one agent | p50 ms | p95 ms |\n|---|---|---|", flush=True)
    for kind in ("areal_agent", "floor"):
        async with open_side(world, kind) as side, load(world, side, 1) as agents:
            agent = agents[0]
            for _ in range(3 if is_quick else 20):
                await agent.start()
                for _ in range(16):
                    await agent.turn()
            ordered = sorted(agent.latencies_s)
            p50, p95 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
            print(f"| {kind} | {p50 * 1000:.2f} | {p95 * 1000:.2f} |", flush=True)


async def throughput(world: World, is_quick: bool) -> None:
    """Measure 256 agents on an engine that takes one second: 256 requests per second would be perfect."""
    print("\n| 256 agents, 1 s of engine time | requests/s |\n|---|---|", flush=True)
    num_turns = 3 if is_quick else 16
    for kind in ("areal_agent", "floor"):
        async with open_side(world, kind, engine_url=world.slow_engine_url) as side, load(world, side, 256) as agents:
            for agent in agents:
                await agent.start()
            started_s = time.perf_counter()
            await play(agents, num_turns)
            per_s = 256 * num_turns / (time.perf_counter() - started_s)
            print(f"| {kind} | {per_s:.0f} |", flush=True)


async def memory(world: World, is_quick: bool) -> None:
    """Measure the resident memory of an open session of 128 turns."""
    num_agents, num_turns = (8, 32) if is_quick else (32, 128)
    async with open_side(world, "areal_agent") as side, load(world, side, num_agents + 4) as agents:
        await play(agents[:4], num_turns)  # buffers, caches and arenas grow with these
        for agent in agents:
            await agent.start()
        await asyncio.sleep(MEMORY_SETTLES_S)
        before = resident_bytes(side.process.pid)
        await play(agents[4:], num_turns)
        await asyncio.sleep(MEMORY_SETTLES_S)
        per_session = (resident_bytes(side.process.pid) - before) / num_agents
        print(f"\nMemory of an open session of {num_turns} turns: {per_session / 1e6:.2f} MB", flush=True)


async def many(world: World, is_quick: bool) -> None:
    """Open 2,000 sessions at once, each with a call in flight."""
    number = 200 if is_quick else 2000
    async with (
        open_side(world, "areal_agent", engine_url=world.slow_engine_url) as side,
        load(world, side, number) as agents,
    ):
        for first in range(0, number, 100):
            await asyncio.gather(*(agent.start() for agent in agents[first : first + 100]))
        outcomes = await asyncio.gather(*(agent.turn() for agent in agents), return_exceptions=True)
        num_failed = sum(isinstance(outcome, BaseException) for outcome in outcomes)
        print(f"\n{number} sessions with a call in flight at once: {num_failed} errors", flush=True)
        for outcome in [outcome for outcome in outcomes if isinstance(outcome, BaseException)][:3]:
            print(f"  {outcome!r:.300}")


async def scale(world: World, is_quick: bool) -> None:
    """Compare two gateways with one, each bound to the same share of a core, so that engine and agents have enough."""
    share = 0.2 * (os.cpu_count() or 1) / 2
    if not CpuBound.is_possible():
        print("\nTwo workers against one: not measured, no cgroup (version 1) can be made here")
        return
    figures: list[float] = []
    for num_sides in (1, 2):
        rounds = [await _bounded_throughput(world, num_sides, share, 8 if is_quick else 16) for _ in range(3)]
        figures.append(statistics.median(rounds))
    print(f"\n| gateways, {share:g} of a core each | turns/s |\n|---|---|\n| 1 | {figures[0]:.0f} |")
    print(f"| 2 | {figures[1]:.0f} |\n\nTwo are {figures[1] / figures[0]:.2f} times one", flush=True)


async def _bounded_throughput(world: World, num_sides: int, share: float, num_turns: int) -> float:
    async with (
        open_side(world, "areal_agent", core=None) as first,
        open_side(world, "areal_agent", core=None) as second,
    ):
        sides = (first, second)[:num_sides]
        loads = [load(world, side, 16) for side in sides]
        agents = [agent for one in loads for agent in await one.__aenter__()]
        await play(agents, 2)
        for agent in agents:
            await agent.start()
        bounds = [CpuBound(str(index), side.process.pid, share) for index, side in enumerate(sides)]
        started_s = time.perf_counter()
        await play(agents, num_turns)
        per_s = len(agents) * num_turns / (time.perf_counter() - started_s)
        for one in loads:
            await one.__aexit__(None, None, None)
    for bound in bounds:
        bound.close()
    return per_s


MEASUREMENTS = {
    "cpu": cpu,
    "instructions": instructions,
    "protocols": protocols,
    "latency": latency,
    "throughput": throughput,
    "memory": memory,
    "many": many,
    "scale": scale,
}


# ------------------------------------------------------------------------------------------------------ the parts


async def play(agents: Sequence[Agent], num_turns: int) -> None:
    """Let all agents play this many turns at once; those that have not started do so first."""

    async def one(agent: Agent) -> None:
        if not agent.has_started:
            await agent.start()
        for _ in range(num_turns):
            await agent.turn()

    await asyncio.gather(*(one(agent) for agent in agents))


async def cpu_of_turns(side: Side, agents: Sequence[Agent], num_turns: int) -> float:
    """Return the CPU milliseconds per turn of the next turns."""
    before = cpu_ns(side.process.pid)
    await play(agents, num_turns)
    return (cpu_ns(side.process.pid) - before) / 1e6 / (num_turns * len(agents))


@asynccontextmanager
async def open_side(
    world: World,
    kind: str,
    *,
    engine_url: str | None = None,
    core: int | None = GATEWAY_CORE,
    under: Sequence[str] = (),
) -> AsyncGenerator[Side]:
    """Start a gateway in a process of its own, on a core of its own; `under` is the command that runs it."""
    engine_url = engine_url or world.engine_url
    if kind == "areal_agent":
        process, base_url = await _start_gateway(world, engine_url, under)
    else:
        arguments = (kind, "--engine", engine_url, "--tokenizer", str(world.tokenizer))
        process, base_url = _start(world.folder, "references.py", *arguments, under=under)
    try:
        if core is not None:
            pin(process.pid, {core})
        yield Side(process=process, base_url=base_url)
    finally:
        stop(process)


@asynccontextmanager
async def load(world: World, side: Side, num_agents: int, protocol: str = "chat") -> AsyncGenerator[list[Agent]]:
    """Make agents in this process, not yet started. One that is no protocol's name is a gateway for chat."""
    spoken = PROTOCOLS.get(protocol, PROTOCOLS["chat"])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as http:
        yield [Agent(http, side.base_url, ADMIN_KEY, world.text, number, spoken) for number in range(num_agents)]


async def _start_gateway(world: World, engine_url: str, under: Sequence[str]) -> tuple[subprocess.Popen[bytes], str]:
    process, port = _spawn_gateway(world, engine_url, under)
    base_url = f"http://127.0.0.1:{port}"
    async with asyncio.timeout(READY_S), aiohttp.ClientSession(trust_env=False) as http:
        while process.poll() is None:
            try:
                async with http.get(f"{base_url}/health"):
                    return process, base_url
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway ended with exit code {process.returncode} before it served")


def _spawn_gateway(world: World, engine_url: str, under: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
    port = _free_port()
    ledger = Path(tempfile.mkdtemp(dir=world.folder)) / "ledger.sqlite"
    arguments = ["--engine", engine_url, "--tokenizer", str(world.tokenizer), "--port", str(port)]
    process = subprocess.Popen(
        [*ENDING_WITH_US, *under, sys.executable, "-m", "areal_agent.gateway", *arguments, "--ledger", str(ledger)],
        env={**os.environ, "AREAL_AGENT_ADMIN_KEY": ADMIN_KEY},
        stdout=subprocess.DEVNULL,
    )
    return process, port


def _start(
    folder: Path, script: str, *arguments: str, under: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a script of this folder that prints its port."""
    argv = [*ENDING_WITH_US, *under, sys.executable, str(HERE / script), *arguments]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=folder)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _other_cores() -> set[int]:
    return set(range(os.cpu_count() or 1)) - {GATEWAY_CORE} or {GATEWAY_CORE}


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
