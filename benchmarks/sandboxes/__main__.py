"""What a program in a sandbox costs, beside fork and exec on the host and, where an engine answers, Docker's own ways.

All of them take turns within one run, so that what else the machine does falls on all alike: read the ratios.
`python benchmarks/sandboxes [--rounds 30]` prints three tables in Markdown; times in milliseconds, medians. The third
is of the judge: CPU times there are those of all processes, the starts of sandboxes included.
"""

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack

import docker

from areal_agent.errors import SandboxError
from sandboxes import Pool, Sandbox, open_pool
from sandboxes.backends import Backend
from sandboxes.containers.base_image import DEFAULT_IMAGE
from sandboxes.environment import PROGRAM_PATH
from sandboxes.judge import CallCase, StdinCase, grade

TRUE = ["true"]
PYTHON = ["python3", "-I", "-S", "-c", "pass"]
BACKENDS: tuple[Backend, ...] = ("subprocess", "namespaces", "bubblewrap", "docker")
AT_ONCE = 16
MANY = 1000
GRADES, CASES = 4, 50

Call = Callable[[list[str]], Awaitable[object]]


async def fork_and_exec(argv: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, env={"PATH": PROGRAM_PATH})
    await process.wait()


def in_container(container: str) -> dict[str, Call]:
    """Docker's own ways, in a container that runs."""
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
    """Calls a second, so many at once."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with slots:
            await call(argv)

    elapsed_ms = await timed_ms(lambda: asyncio.gather(*(one() for _ in range(num_calls))))
    return num_calls * 1000 / elapsed_ms


async def many_at_once(box: Sandbox) -> tuple[float, int]:
    """The loop's lag in milliseconds (p99) while 1,000 programs run, and threads that came of them."""
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
    """Until a sandbox from a warm pool has its first file."""
    await pool.warm(num_cells=1)
    started_s = time.perf_counter()
    async with pool.acquire() as box:
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
    print("\n| | client CPU an exec, ms | 1,000 at once: loop lag p99, ms | new threads |\n|---|---|---|---|")
    for way, box in boxes.items():
        cpu_s = time.process_time()
        for _ in range(num_calls):
            await box.exec(TRUE)
        cpu_ms = (time.process_time() - cpu_s) * 1000 / num_calls
        lag_ms, num_threads = await many_at_once(box)
        print(f"| {way} | {cpu_ms:.2f} | {lag_ms:.1f} | {num_threads} |")


async def grade_all(
    backend: Backend, code: str, cases: Sequence[StdinCase] | Sequence[CallCase]
) -> tuple[float, float]:
    """Cases a second, and milliseconds of CPU a case."""
    num_cases = len(cases) * GRADES
    before_s = cpu_s()
    async with open_pool(backend=backend, wall_s=120.0) as pool:
        await pool.warm(num_cells=GRADES)
        started_s = time.perf_counter()
        verdicts = await asyncio.gather(*(grade(code, cases, pool=pool) for _ in range(GRADES)))
        elapsed_s = time.perf_counter() - started_s
    assert all(verdict.is_passed for verdict in verdicts), verdicts
    return num_cases / elapsed_s, (cpu_s() - before_s) * 1000 / num_cases


def cpu_s() -> float:
    """Of this process and of all that it has started and seen end."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


async def measure_grading(backends: Iterable[Backend], rounds: int) -> None:
    texts = [StdinCase(stdin=f"{number} 2", expected=str(number + 2)) for number in range(CASES)]
    calls = [CallCase(function="add", args=[number, 2], expected=number + 2) for number in range(CASES)]
    print(f"\n| {GRADES} programs at once, {CASES} cases each | texts a second | CPU | calls a second | CPU |")
    print("|---|---|---|---|---|")
    for backend in backends:
        cells: list[str] = []
        for code, cases in (("print(sum(map(int, input().split())))", texts), ("def add(a, b): return a + b", calls)):
            found = [await grade_all(backend, code, cases) for _ in range(rounds)]
            cpu_ms = statistics.median(cpu for _, cpu in found)
            cells.append(f"{statistics.median(rate for rate, _ in found):.0f}")
            cells.append("" if backend == "docker" else f"{cpu_ms:.2f}")  # its containers are no children of ours
        print(f"| {backend} | {' | '.join(cells)} |")


def start_container(image: str) -> str:
    """One that sleeps, for Docker's own ways."""
    command = ["docker", "run", "--rm", "--detach", "--network", "none", image, "sleep", "3600"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def main() -> None:
    parser = argparse.ArgumentParser(description="What a program in a sandbox costs.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--image", help=f"of Docker's own ways, for example {DEFAULT_IMAGE}; left out without")
    options = parser.parse_args()
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
    await measure_grading([backend for backend in BACKENDS if backend in pools], min(options.rounds, 5))


asyncio.run(main())
