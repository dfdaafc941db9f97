"""A run on a Ray cluster of three nodes beside the same run without Ray: start, steps, and the way back from a loss.

    python benchmarks/cluster [--steps 10] [--repeats 3] [--losses engine worker trainer] [key=value ...]

The run is the quickstart with two engines and two rollout workers. Without Ray the process of an engine or a worker is
killed; on the cluster the whole node on which it is, beside which another has just joined. All nodes are processes of
this machine and share its cores, so what the cluster costs here is what Ray and the detours cost, and nothing is gained
by more machines. Times run from the kill: `noticed` until the run knows, `back` until a new process does its work (an
engine has the newest weights by then). Training goes on meanwhile; the ledger of every run is proved at its end.

The trainer has two ranks in a run of its own, with one engine; on the cluster each on a node of its own. Without Ray
the trainer is killed, and on the cluster the node of a rank. This run is the command itself, and what it says tells the
times: on the cluster it goes on from its last checkpoint by itself (`cluster.restarts`), with the one rank for which
there is room; without Ray `--resume` is given at once. Here `start` is until the first step is done, `noticed` until
all processes have ended and the new size is found, and `back` until the first step after that is done.
"""

import argparse
import asyncio
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.cluster.ray_hosts import NICENESS
from areal_agent.config import Config
from areal_agent.engine.fleet.member import MemberState
from areal_agent.files import RunFolder
from areal_agent.ledger.verify import verify
from areal_agent.process import ENDING_WITH_US
from areal_agent.run import Run
from areal_agent.run.loop import INTERRUPTED_CODE
from areal_agent.run.sources import OwnRollouts

ROOT = Path(__file__).parents[2]
BASE = ("eval.num_tasks=0", "rollout.workers=2", "rollout.max_concurrent=512", "steps=100000")
TRAINER = ("trainer.threads=2",)  # an engine has one: so many CPUs say what is where
ON_RAY = ("cluster.kind=ray", "cluster.worker_resources={worker: 1}", "cluster.placement_timeout_s=600")
POLL_S = 0.02

COLUMNS = ("processes", "start s", "steps/minute", "lost", "noticed s", "back s", "steps meanwhile")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What is lost: one of two that are there, killed as a process, or with its node, which has nothing else then."""

    what: str
    of_node: str
    kill: Callable[[Any], None]  # given the `Run`, or without `num_there` the command's process
    head: Mapping[str, Any]
    node: Mapping[str, Any]
    settings: Sequence[str] = ("engine.num_servers=2",)
    num_there: Callable[[Run], int] | None = None  # another node joins before the loss; None: the run has to start anew


def serving(run: Run) -> Any:
    """Return what the run serves with: a fleet of engines, and workers."""
    assert isinstance(run.source, OwnRollouts)
    return run.source.serving


def num_engines(run: Run) -> int:
    return sum(one.state is MemberState.SERVING for one in serving(run).engine.client.report())


def num_workers(run: Run) -> int:
    return sum(seat.has_room for seat in serving(run).rollouts.seats)


def kill_engine(run: Run) -> None:
    os.kill(next(iter(run.source.process_ids().values())), signal.SIGKILL)


def kill_worker(run: Run) -> None:
    os.kill(serving(run).rollouts.seats[0].pid, signal.SIGKILL)


def kill_trainer(command: subprocess.Popen[str]) -> None:
    subprocess.run(["pkill", "-KILL", "-P", str(command.pid), "-f", "areal_agent.trainer"], check=True)  # its children


LOSSES = {
    "engine": Loss(
        what="an engine",
        of_node="the node of an engine",
        num_there=num_engines,
        kill=kill_engine,
        head={"num_cpus": 2, "resources": {"worker": 2}},
        node={"num_cpus": 1},
    ),
    "worker": Loss(
        what="a worker",
        of_node="the node of a worker",
        num_there=num_workers,
        kill=kill_worker,
        head={"num_cpus": 4},
        node={"num_cpus": 0, "resources": {"worker": 1}},
    ),
    "trainer": Loss(
        what="the trainer",
        of_node="the node of a rank",
        kill=kill_trainer,
        head={"num_cpus": 1, "resources": {"worker": 2}},
        node={"num_cpus": 2},
        settings=("trainer.num_ranks=2",),
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    start_s: float
    steps_per_minute: float
    noticed_s: float
    back_s: float
    num_steps: int  # from the loss until what was lost was back


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/cluster", description="A Ray cluster beside one machine.")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind, in turns; their medians are told")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for loss in (LOSSES[name] for name in args.losses):
        results: list[tuple[Result, Result]] = []
        for number in range(args.repeats):
            results.append((run_here(loss, args.steps, args.overrides), run_on_ray(loss, args.steps, args.overrides)))
            print(f"{loss.what}, {number}: {results[-1]}", file=sys.stderr, flush=True)
        here, on_ray = zip(*results, strict=True)
        report("local", loss.what, here)
        report("Ray", loss.of_node, on_ray)
    return 0


def report(processes: str, lost: str, results: Sequence[Result]) -> None:
    """Print a row of medians."""

    def median(name: str) -> str:
        return f"{statistics.median(getattr(one, name) for one in results):.1f}"

    cells = [processes, median("start_s"), median("steps_per_minute"), lost]
    print("| " + " | ".join([*cells, median("noticed_s"), median("back_s"), median("num_steps")]) + " |", flush=True)


def run_here(loss: Loss, num_steps: int, overrides: Sequence[str]) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return measure(config_of(folder, loss, overrides), loss, num_steps, loss.kill, lambda: None)


def run_on_ray(loss: Loss, num_steps: int, overrides: Sequence[str]) -> Result:
    """Run on a cluster of its own."""
    with tempfile.TemporaryDirectory() as folder, open_cluster(loss) as (cluster, nodes):
        config = config_of(folder, loss, [*ON_RAY, f"cluster.address={cluster.address}", *overrides])

        def lose(_: object) -> None:
            cluster.remove_node(nodes[0], allow_graceful=False)

        return measure(config, loss, num_steps, lose, lambda: cluster.add_node(**loss.node))


def config_of(folder: str, loss: Loss, overrides: Sequence[str]) -> Config:
    settings = [*BASE, *TRAINER, *loss.settings, f"run_dir={folder}/run", *overrides]
    return Config.load(ROOT / "configs" / "quickstart.yaml", settings)


@contextmanager
def open_cluster(loss: Loss) -> Generator[tuple[Any, Sequence[Any]]]:
    """Start a head and two nodes; yield the cluster and the two."""
    os.environ |= {NICENESS: "0", "RAY_raylet_start_wait_time_s": "300"}
    from ray.cluster_utils import Cluster  # the variables are read here

    cluster = Cluster(initialize_head=True, head_node_args={**loss.head, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**loss.node) for _ in range(2)]
        cluster.wait_for_nodes()
        yield cluster, nodes
    finally:
        cluster.shutdown()


def measure(
    config: Config, loss: Loss, num_steps: int, lose: Callable[[Any], None], join: Callable[[], object]
) -> Result:
    """Time the start, then `num_steps` steps after the first, then the way back from the loss; prove the ledger."""
    if loss.num_there is None:
        result = measure_command(config, num_steps, lose)
    else:
        result = asyncio.run(measure_run(config, loss.num_there, num_steps, lose, join))
    report = verify(RunFolder(Path(str(config.run_dir))).ledger)
    assert report.is_ok, report
    return result


async def measure_run(
    config: Config,
    num_there: Callable[[Run], int],
    num_steps: int,
    lose: Callable[[Run], None],
    join: Callable[[], object],
) -> Result:
    begun_s = time.perf_counter()
    async with Run(config) as run:
        start_s = time.perf_counter() - begun_s
        await train(run, lambda: run.step >= 1)
        trained_s = time.perf_counter()
        await train(run, lambda: run.step > num_steps)
        steps_per_minute = num_steps / (time.perf_counter() - trained_s) * 60
        join()
        step, lost_s = run.step, time.perf_counter()
        losing = asyncio.create_task(asyncio.to_thread(lose, run))
        watch = asyncio.create_task(gone_and_back(run, num_there))
        try:
            await train(run, watch.done)
        finally:
            watch.cancel()
            await losing
        noticed_s, back_s = (at_s - lost_s for at_s in watch.result())
        num_meanwhile = run.step - step
        await run.save()
        await run.stop_producing()
        await run.settle(is_completed=True)
    return Result(start_s, steps_per_minute, noticed_s, back_s, num_meanwhile)


def measure_command(config: Config, num_steps: int, lose: Callable[[subprocess.Popen[str]], None]) -> Result:
    """Measure a run that loses its trainer right after a checkpoint."""
    file, begun_s = Path(f"{config.run_dir}.yaml"), time.perf_counter()
    file.write_text(config.to_yaml())
    with command("--config", str(file), f"trainer.checkpoint_every={num_steps}") as process:
        first_s = until_said(process, "1/")
        steps_per_minute = num_steps / (until_said(process, f"{num_steps + 1}/") - first_s) * 60
        lost_s = time.perf_counter()
        lose(process)
        noticed_s = until_said(process, "going on after step ")
        back_s = until_said(process, r"\d+/")
    if process.returncode != INTERRUPTED_CODE:
        with command("--resume", str(config.run_dir)) as process:
            back_s = until_said(process, r"\d+/")
    assert process.returncode == INTERRUPTED_CODE, process.returncode
    return Result(first_s - begun_s, steps_per_minute, noticed_s - lost_s, back_s - lost_s, 0)


@contextmanager
def command(*arguments: str) -> Generator[subprocess.Popen[str]]:
    """Start `python -m areal_agent.train ARGUMENTS`, and at the end interrupt it and wait for its end."""
    argv = [*ENDING_WITH_US, sys.executable, "-m", "areal_agent.train", *arguments]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def until_said(process: subprocess.Popen[str], start: str) -> float:
    """Read lines until one starts with a regular expression, or there are none; return the time."""
    assert process.stdout is not None
    next((line for line in process.stdout if re.match(rf"\s*{start}", line)), None)
    return time.perf_counter()


async def gone_and_back(run: Run, num_there: Callable[[Run], int]) -> tuple[float, float]:
    """Wait until one is missing, and until none is; return the times."""
    whole = num_there(run)
    gone_s = await until(lambda: num_there(run) < whole)
    return gone_s, await until(lambda: num_there(run) == whole)


async def train(run: Run, is_over: Callable[[], bool]) -> None:
    while not is_over():
        await run.train_step(await run.prepare_batch())
        await run.push()


async def until(condition: Callable[[], bool]) -> float:
    """Wait for a condition; return the time."""
    while not condition():  # noqa: ASYNC110 (no event tells of all of them)
        await asyncio.sleep(POLL_S)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
