"""The cost of a program in a sandbox, beside fork and exec on the host and, where an engine answers, Docker's own ways.

All sides take turns within one run, so that other load on the machine affects all alike: read the ratios.
`python benchmarks/sandboxes [--rounds 30]` prints four tables in Markdown; times in milliseconds, medians. CPU times,
except the client's, are those of the whole machine: sandboxes, engine, and everything else that runs. The last table
is of the judge; it includes starting and ending as many sandboxes as there are programs.

`--soak N [--backend B]` runs N programs instead, and exits with 1 if they leave anything behind (`soak.py`).
"""

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import docker
from soak import soak

from areal_agent.errors import SandboxError
from sandboxes import Limits, Pool, Sandbox, SandboxSpec, open_pool
from sandboxes.cell import PROGRAM_PATH
from sandboxes.containers.images import DEFAULT_IMAGE
from sandboxes.judge import CallCase, StdinCase, grade
from sandboxes.pool import Backend

TRUE = ["true"]
READS_AND_ADDS = "print(sum(map(int, input().split())))"
ADDS = "def add(a, b): return a + b"
PYTHON = ["python3", "-I", "-S", "-c", "pass"]
BACKENDS: tuple[Backend, ...] = ("subprocess", "jail", "docker")
AT_ONCE = 16
MANY = 1000
GRADES = 4
FEW_CASES, MANY_CASES = 50, 500

Call = Callable[[list[str]], Awaitable[object]]


async def fork_and_exec(argv: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, env={"PATH": PROGRAM_PATH})
    await process.wait()


def in_container(container: str) -> dict[str, Call]:
    """Return Docker's own ways of running a program in a running container."""
    client = docker.from_env()
    inside = client.containers.get(container)

    async def docker_exec(argv: list[str]) -> None:
        process = await asyncio.create_subprocess_exec("docker", "exec", container, *argv)
        await process.wait()

    async def exec_run(argv: list[str]) -> None:
        await asyncio.to_thread(inside.exec_run, argv)

    return {"docker exec": docker_exec, "exec_run": exec_run}


async def timed_ms(call: Callable[[], Awaitable[object]]) -> float:
    started_s = time.perf_counter()
    await call()
    return (time.perf_counter() - started_s) * 1000


async def rate(call: Call, argv: list[str], num_calls: int) -> float:
    """Return the calls per second, `AT_ONCE` at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with slots:
            await call(argv)

    elapsed_ms = await timed_ms(lambda: asyncio.gather(*(one() for _ in range(num_calls))))
    return num_calls * 1000 / elapsed_ms


async def many_at_once(box: Sandbox) -> tuple[float, int]:
    """Return the loop's lag in milliseconds (p99) while 1,000 programs run, and the number of threads they started."""
    lags_ms: list[float] = []

    async def feel() -> None:
        while True:
            lags_ms.append(max(0.0, await timed_ms(lambda: asyncio.sleep(0.005)) - 5))

    num_threads = threading.active_count()
    feeler = asyncio.create_task(feel())
    await asyncio.gather(*(box.exec(TRUE) for _ in range(MANY)))
    feeler.cancel()
    return statistics.quantiles(lags_ms, n=100)[-1], threading.active_count() - num_threads


async def checkout_ms(pool: Pool) -> float:
    """Return the time until a sandbox from a warm pool has its first file."""
    await pool.warm(num_cells=1)
    return await first_file_ms(pool, SandboxSpec())


async def first_file_ms(pool: Pool, spec: SandboxSpec) -> float:
    started_s = time.perf_counter()
    async with pool.acquire(spec) as box:
        await box.write("ready", b"")
        return (time.perf_counter() - started_s) * 1000


async def measure(pools: dict[str, Pool], boxes: dict[str, Sandbox], calls: dict[str, Call], rounds: int) -> None:
    times: dict[tuple[str, str], list[float]] = {}

    async def note(way: str, what: str, call: Callable[[], Awaitable[object]]) -> None:
        times.setdefault((way, what), []).append(await timed_ms(call))

    for _ in range(rounds):
        for way, call in calls.items():
            await note(way, "true", lambda call=call: call(TRUE))
            await note(way, "python", lambda call=call: call(PYTHON))
        for way, box in boxes.items():
            await note(way, "warm python", lambda box=box: box.exec_python("pass"))
        for way, pool in pools.items():
            times.setdefault((way, "checkout"), []).append(await checkout_ms(pool))
    rates = {way: await rate(call, PYTHON, AT_ONCE * 6) for way, call in calls.items()}
    median = {key: statistics.median(values) for key, values in times.items()}
    base = "fork and exec"
    print("| | true | python3 | over fork | warm Python | python3 a second, 16 at once | of fork | checkout |")
    print("|---|---|---|---|---|---|---|---|")
    for way in calls:
        cells = [
            f"{median[way, 'true']:.1f}",
            f"{median[way, 'python']:.1f}",
            f"{median[way, 'python'] - median[base, 'python']:+.1f}",
            f"{median[way, 'warm python']:.1f}" if (way, "warm python") in median else "",
            f"{rates[way]:.0f}",
            f"{rates[way] / rates[base]:.0%}",
            f"{median[way, 'checkout']:.1f}" if (way, "checkout") in median else "",
        ]
        print(f"| {way} | {' | '.join(cells)} |")


async def measure_many(boxes: dict[str, Sandbox], num_calls: int) -> None:
    print(
        "\n| one after another | true | client CPU of it | CPU of python3 | 1,000 at once: loop lag p99 | new threads |"
        "\n|---|---|---|---|---|---|"
    )
    _, fork_cpu_ms = await cpu_and_wall_ms(fork_and_exec, PYTHON, num_calls, cpu_s)
    print(f"| fork and exec | | | {fork_cpu_ms:.1f} | | |")
    for way, box in boxes.items():
        true_ms, client_ms = await cpu_and_wall_ms(box.exec, TRUE, num_calls, time.process_time)
        _, python_cpu_ms = await cpu_and_wall_ms(box.exec, PYTHON, num_calls, cpu_s)
        lag_ms, num_threads = await many_at_once(box)
        print(f"| {way} | {true_ms:.1f} | {client_ms:.2f} | {python_cpu_ms:.1f} | {lag_ms:.1f} | {num_threads} |")


async def cpu_and_wall_ms(
    call: Call, argv: list[str], num_calls: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return milliseconds per call, and those of `clock` (in seconds), one call after the other."""
    before_s, started_s = clock(), time.perf_counter()
    for _ in range(num_calls):
        await call(argv)
    scale = 1000 / num_calls
    return (time.perf_counter() - started_s) * scale, (clock() - before_s) * scale


async def measure_creation(pools: dict[str, Pool], image: str | None, rounds: int) -> None:
    """Measure the time until a sandbox that is not in stock has its first file, beside `docker run`."""
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        spec = SandboxSpec(limits=Limits(wall_s=200.0 + number))  # no other sandbox has these limits
        for way, pool in pools.items():
            times.setdefault(way, []).append(await first_file_ms(pool, spec))
        if image is not None:
            times.setdefault("docker run", []).append(await timed_ms(partial(docker_run, image)))
    print("\n| | from nothing to the first file |\n|---|---|")
    for way, values in times.items():
        print(f"| {way} | {statistics.median(values):.0f} |")


async def docker_run(image: str) -> None:
    command = ["docker", "run", "--rm", "--network", "none", image, *TRUE]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0


async def grade_all(
    backend: Backend, code: str, cases: Sequence[StdinCase] | Sequence[CallCase]
) -> tuple[float, float]:
    """Return cases per second, and CPU milliseconds per case."""
    num_cases = len(cases) * GRADES
    async with open_pool(backend=backend, wall_s=120.0) as pool:
        await pool.warm(num_cells=GRADES)
        before_s = cpu_s()
        started_s = time.perf_counter()
        verdicts = await asyncio.gather(*(grade(code, cases, pool=pool) for _ in range(GRADES)))
        elapsed_s = time.perf_counter() - started_s
        used_s = cpu_s() - before_s
    assert all(verdict.is_passed for verdict in verdicts), verdicts
    return num_cases / elapsed_s, used_s * 1000 / num_cases


def cpu_s() -> float:
    """Return the CPU seconds of all processes of this machine and of its kernel."""
    user, nice, system, _idle, _waiting, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    return sum((user, nice, system, *interrupts)) / os.sysconf("SC_CLK_TCK")


async def measure_grading(backends: Sequence[Backend], rounds: int) -> None:
    print(f"\n| {GRADES} programs at once | cases of each | texts a second | CPU | calls a second | CPU |")
    print("|---|---|---|---|---|---|")
    for num_cases, num_rounds in ((FEW_CASES, rounds), (MANY_CASES, 1)):
        texts = [StdinCase(stdin=f"{number} 2", expected=str(number + 2)) for number in range(num_cases)]
        calls = [CallCase(function="add", args=[number, 2], expected=number + 2) for number in range(num_cases)]
        for backend in backends:
            cells: list[str] = []
            for code, cases in ((READS_AND_ADDS, texts), (ADDS, calls)):
                found = [await grade_all(backend, code, cases) for _ in range(num_rounds)]
                cells.append(f"{statistics.median(rate for rate, _ in found):.0f}")
                cells.append(f"{statistics.median(cpu_ms for _, cpu_ms in found):.2f}")
            print(f"| {backend} | {num_cases} | {' | '.join(cells)} |")


def start_container(image: str) -> str:
    """Start a container that sleeps, for Docker's own ways."""
    command = ["docker", "run", "--rm", "--detach", "--network", "none", image, "sleep", "3600"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def main() -> None:
    parser = argparse.ArgumentParser(description="What a program in a sandbox costs.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--image", help=f"of Docker's own ways, for example {DEFAULT_IMAGE}; left out without")
    parser.add_argument("--soak", type=int, metavar="N", help="instead, N executions, and what they leave behind")
    parser.add_argument("--backend", choices=BACKENDS, default="jail", help="of --soak")
    options = parser.parse_args()
    if options.soak:
        sys.exit(await soak(options.backend, options.soak))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 16_384) if most > 0 else 16_384, most))
    calls: dict[str, Call] = {"fork and exec": fork_and_exec}
    pools: dict[str, Pool] = {}
    boxes: dict[str, Sandbox] = {}
    async with AsyncExitStack() as stack:
        for backend in BACKENDS:
            try:
                pools[backend] = await stack.enter_async_context(
                    open_pool(backend=backend, wall_s=120.0, max_concurrent=MANY)
                )
            except SandboxError as error:
                print(f"{backend} is left out: {error}", file=sys.stderr)
                continue
            boxes[backend] = await stack.enter_async_context(pools[backend].acquire())
            calls[backend] = boxes[backend].exec
        if options.image:
            container = await asyncio.to_thread(start_container, options.image)
            stack.callback(subprocess.run, ["docker", "kill", container], check=False, capture_output=True)
            calls.update(in_container(container))
        await measure(pools, boxes, calls, options.rounds)
        await measure_many(boxes, num_calls=100)
        await measure_creation(pools, options.image, min(options.rounds, 10))
    await measure_grading([backend for backend in BACKENDS if backend in pools], min(options.rounds, 5))


asyncio.run(main())
