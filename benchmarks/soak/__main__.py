"""An hour of one gateway: does anything grow, get lost, or end in a 5xx?

    python benchmarks/soak --out DIR [--minutes 60] [--sessions 500] [--fuzz 100000]

`python -m areal_agent.gateway` with its ledger stands before scripted engines that share one address, as behind a load
balancer (`engine.py`): every `KILL_EVERY_S` one is killed and started again, and every `PUSH_EVERY_S` all get new
weights. Agents and a trainer (`load.py`) and a fuzzer (`fuzz.py`) call it. Meanwhile memory, descriptors, threads and
CPU of the gateway are read from /proc, the size of its ledger, and what a turn took beyond the engine's time.

DIR gets samples.json, soak.png and the logs. A figure is flat if its median in the last quarter is within `LIMITS` of
that in the first; the time until there are sessions of every age is left out. The exit status is 1 if a figure grew, an
answered turn was lost, there was any 5xx (an engine always serves), the gateway ended with another status than 0, or
`ledger verify` found a fault. Linux only.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import resource
import signal
import socket
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[2]))

from areal_agent.engine.wire import control
from areal_agent.process import ENDING_WITH_US
from areal_agent.rollout.online import OnlineGateway
from areal_agent.types import WeightVersion
from benchmarks.gateway import model
from benchmarks.gateway.meter import cpu_ns, resident_bytes, waited_ns
from benchmarks.soak.engine import ANSWER_S
from benchmarks.soak.fuzz import Fuzzer
from benchmarks.soak.load import Load

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "soak"
NUM_ENGINES = 3
KILL_EVERY_S, PUSH_EVERY_S, SAMPLE_EVERY_S = 20.0, 10.0, 5.0
NUM_LAST_STEPS = 3  # what the fuzzer finished may take places in the first
NUM_PARTS = 10  # of the table
WINDOW = 12  # samples over which the ledger's growth is measured: it grows in leaps
MAX_WAITED = 0.2  # cores; a gateway that waits for more says nothing of its own times
MIN_SAMPLES = 10  # of a quarter; with fewer nothing is said of growth
WAITED = "cores waited for"
LIMITS = {  # by figure: the last quarter over the first, and what it may have more besides
    "memory, MiB": (1.05, 4.0),
    "descriptors": (1.1, 10.0),
    "threads": (1.0, 1.0),
    "disk a session, KiB": (1.1, 0.0),
    "p99, ms": (1.3, 10.0),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What was so at a moment, and the errors since the sample before."""

    at_s: float
    figures: dict[str, float]
    errors: dict[str, int]


@dataclass(kw_only=True)
class Servers:
    """The gateway's process, and those of the engines behind it."""

    folder: Path
    step: int = 0  # the version that engines have
    num_kills: int = 0
    base_url: str = ""
    gateway: Process = field(init=False)
    engines: list[tuple[Process, str]] = field(default_factory=list[tuple[Process, str]])  # and their own ports
    address: socket.socket = field(default_factory=socket.socket)  # does not listen; keeps the port for those that do

    async def start(self) -> None:
        self.address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.address.bind(("127.0.0.1", 0))
        tokenizer = model.build_tokenizer(self.folder / "tokenizer")
        (self.folder / "answers.json").write_text(json.dumps(model.answers(tokenizer, 64)))
        self.engines = list(await asyncio.gather(*(self._start_engine() for _ in range(NUM_ENGINES))))
        command = ["-m", "areal_agent.gateway", "--engine", f"http://127.0.0.1:{self.address.getsockname()[1]}"]
        command += [
            "--tokenizer",
            str(self.folder / "tokenizer"),
            "--port",
            "0",
            "--ledger",
            str(self.folder / "ledger"),
        ]
        self.gateway, ready = await self._start("gateway", *command)
        self.base_url = ready.split()[-1]

    async def kill_in_turn(self, every_s: float) -> None:
        for index in itertools.cycle(range(NUM_ENGINES)):
            await asyncio.sleep(every_s)
            self.engines[index][0].kill()
            await asyncio.sleep(every_s / 4)
            self.engines[index] = await self._start_engine()
            self.num_kills += 1

    async def push(self) -> None:
        """Give the next version to all engines that are there."""
        self.step += 1
        body = control.DiskUpdate(
            model_path="weights", weight_version=WeightVersion(incarnation=1, step=self.step)
        ).encode()
        async with aiohttp.ClientSession(trust_env=False) as http:
            for _, port in self.engines:
                with contextlib.suppress(aiohttp.ClientError):
                    await http.post(f"http://127.0.0.1:{port}{control.UPDATE_FROM_DISK}", json=body)

    async def end(self) -> int:
        """End the gateway as its user would, then the engines. Return the gateway's exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.gateway.send_signal(signal.SIGTERM)
        status = await self.gateway.wait()
        for engine, _ in self.engines:
            with contextlib.suppress(ProcessLookupError):
                engine.kill()
        self.address.close()
        return status

    async def _start_engine(self) -> tuple[Process, str]:
        options = ["--answers", str(self.folder / "answers.json"), "--version", f"1:{self.step}"]
        port = str(self.address.getsockname()[1])
        return await self._start("engines", "benchmarks/soak/engine.py", "--port", port, *options)

    async def _start(self, log: str, *command: str) -> tuple[Process, str]:
        """Start one of our programs, and return its first line."""
        environment = {**os.environ, "AREAL_AGENT_ADMIN_KEY": ADMIN_KEY, "PYTHONPATH": str(ROOT)}
        with (self.folder / f"{log}.log").open("ab") as file:
            command = (*ENDING_WITH_US, sys.executable, *command)
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=environment, stdout=PIPE, stderr=file
            )
        assert process.stdout is not None
        return process, (await process.stdout.readline()).decode().strip()


async def soak(args: argparse.Namespace, folder: Path) -> int:
    servers, samples, duration_s = Servers(folder=folder), list[Sample](), 60 * args.minutes
    pace = min(1.0, args.minutes)  # shorter than a minute, all comes in quicker succession
    await servers.start()
    load = Load(
        base_url=servers.base_url,
        admin_key=ADMIN_KEY,
        text=" ".join("\n".join(model.library_texts()).split()),
        num_sessions=args.sessions,
        turns_per_s=args.turns_per_s,
        mean_turns=args.turns,
    )
    fuzzer = Fuzzer(
        port=int(servers.base_url.rsplit(":", 1)[1]),
        admin_key=ADMIN_KEY,
        num_requests=args.fuzz,
        duration_s=duration_s,
        chance=random.Random(args.seed),
    )
    trainer = OnlineGateway(servers.base_url, ADMIN_KEY, trainer="soak")

    async def train() -> None:
        while not load.over.is_set():
            await asyncio.sleep(pace * PUSH_EVERY_S)
            await servers.push()
            await load.train(trainer, servers.step)

    async with asyncio.TaskGroup() as group:
        endless = [servers.kill_in_turn(pace * KILL_EVERY_S)]
        endless += [watch(servers, load, fuzzer, samples, pace * SAMPLE_EVERY_S)]
        others = [group.create_task(one) for one in endless]
        callers = [group.create_task(one) for one in (load.play(), fuzzer.play(), train())]
        await asyncio.sleep(duration_s)
        load.over.set()
        await asyncio.wait(callers)
        for task in others:
            task.cancel()
    for step in range(servers.step + 1, servers.step + 1 + NUM_LAST_STEPS):
        await load.train(trainer, step)
    await trainer.aclose()
    errors = load.errors + fuzzer.errors
    if load.ended:
        errors[f"lost: never leased: {' '.join(load.ended)[:400]}"] = len(load.ended)
    if status := await servers.end():
        errors[f"the gateway ended with {status}"] += 1
    verify = [*ENDING_WITH_US, sys.executable, "-m", "areal_agent.ledger", "verify", str(folder / "ledger")]
    if await (await asyncio.create_subprocess_exec(*verify, cwd=ROOT)).wait():
        errors["ledger verify found a fault"] += 1
    (folder / "samples.json").write_text(json.dumps([asdict(one) for one in samples]))
    warm_s = min(max(duration_s / 10, load.longest_session_s), duration_s / 2)
    draw(samples, warm_s, folder / "soak.png")
    judged = growth([one for one in samples if one.at_s >= warm_s])
    statuses = ", ".join(f"{number:,} {status}" for status, number in fuzzer.statuses.most_common())
    print(f"\n{table(samples)}\n\n{load.num_turns:,} turns; {load.num_ended:,} sessions, {load.num_leased:,} leased")
    print(
        f"{servers.step} pushes; {servers.num_kills} kills; {fuzzer.statuses.total():,} fuzzed requests: {statuses}\n"
    )
    print("\n".join(judged.values()) or "too short to say whether anything grows")
    for error, number in errors.most_common():
        print(f"{number} x {error}")
    return 1 if errors or any("GREW" in line for line in judged.values()) else 0


async def watch(servers: Servers, load: Load, fuzzer: Fuzzer, samples: list[Sample], every_s: float) -> None:
    """Add samples for ever."""
    pid, last_s, seen = servers.gateway.pid, time.monotonic(), Counter[str]()
    cpu, waited = cpu_ns(pid), waited_ns(pid)
    started_s, sizes = last_s, deque([(0, 0)], maxlen=WINDOW)  # of the ledger, and the turns until then
    while True:
        await asyncio.sleep(every_s)
        latencies = sorted(load.latencies_s) or [ANSWER_S]
        now_s, now_cpu, now_waited = time.monotonic(), cpu_ns(pid), waited_ns(pid)
        sizes.append((sum(file.stat().st_size for file in servers.folder.glob("ledger/*.sqlite*")), load.num_turns))
        num_bytes, num_turns = (new - old for new, old in zip(sizes[-1], sizes[0], strict=True))
        errors = Counter(one.partition(":")[0] for one in (load.errors + fuzzer.errors).elements())
        figures = {
            "memory, MiB": resident_bytes(pid) / 2**20,
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "disk a session, KiB": num_bytes / 1024 / max(num_turns, 1) * load.mean_turns,
            "p50, ms": 1000 * (statistics.median(latencies) - ANSWER_S),
            "p99, ms": 1000 * (latencies[int(len(latencies) * 0.99)] - ANSWER_S),
            "turns/s": len(load.latencies_s) / (now_s - last_s),
            "cores": (now_cpu - cpu) / 1e9 / (now_s - last_s),
            WAITED: (now_waited - waited) / 1e9 / (now_s - last_s),
        }
        samples.append(Sample(now_s - started_s, figures, dict(errors - seen)))
        load.latencies_s.clear()
        cpu, waited, seen, last_s = now_cpu, now_waited, errors, now_s


def table(samples: Sequence[Sample]) -> str:
    """Lay out the medians of each tenth of the time."""
    names = list(samples[0].figures) if samples else []
    lines = [f"| minutes | {' | '.join(names)} | errors |", "|---" * (len(names) + 2) + "|"]
    for part in range(NUM_PARTS):
        of_it = samples[len(samples) * part // NUM_PARTS : len(samples) * (part + 1) // NUM_PARTS]
        if of_it:
            errors = sum((Counter(one.errors) for one in of_it), Counter[str]())
            told = ", ".join(f"{number} {kind}" for kind, number in errors.items()) or "0"
            cells = [f"{statistics.median(one.figures[name] for one in of_it):.4g}" for name in names]
            lines.append(f"| {' | '.join((f'{of_it[-1].at_s / 60:.1f}', *cells, told))} |")
    return "\n".join(lines)


def growth(samples: Sequence[Sample]) -> dict[str, str]:
    """Return a sentence on each figure; none if there are too few samples."""
    quarter = len(samples) // 4
    ends = samples[:quarter], samples[len(samples) - quarter :]
    judged: dict[str, str] = {}
    for name, (factor, more) in LIMITS.items() if quarter >= MIN_SAMPLES else ():
        first, last = (statistics.median(one.figures[name] for one in end) for end in ends)
        verdict = "GREW" if last > factor * first + more else "flat"
        if name == "p99, ms" and statistics.median(one.figures[WAITED] for one in samples) > MAX_WAITED:
            verdict = "not judged, as the gateway had to wait for a core"
        judged[name] = f"{name}: {verdict}, {first:.4g} in the first quarter and {last:.4g} in the last"
    return judged


def draw(samples: Sequence[Sample], warm_s: float, path: Path) -> None:
    figure = Figure(figsize=(8, 2 * len(LIMITS)), layout="constrained")
    FigureCanvasAgg(figure)
    for name, axes in zip(LIMITS, figure.subplots(len(LIMITS), 1, sharex=True), strict=True):
        axes.plot([one.at_s / 60 for one in samples], [one.figures[name] for one in samples], linewidth=1)
        axes.axvspan(0, warm_s / 60, color="0.9")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(name)
    figure.axes[-1].set_xlabel("minutes")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/soak", description="A gateway under load for an hour.")
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, default=500, help="open at once")
    parser.add_argument("--turns", type=int, default=24, help="of a session, on average")
    parser.add_argument(
        "--turns-per-s", type=float, default=60.0, help="of all sessions; for half a core of the gateway"
    )
    parser.add_argument("--fuzz", type=int, default=100_000, help="fuzzed requests, spread over the time")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzer")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    args.out.mkdir(parents=True)
    return asyncio.run(soak(args, args.out.resolve()))


if __name__ == "__main__":
    sys.exit(main())
