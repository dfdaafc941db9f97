"""The planner against measured runs: calibrated from one, how far is it off on three with tool waits that it never saw?

    python benchmarks/async/planned.py [--steps 12] [--out DIR]

All runs are the quickstart's task with its tiny model, 8 x 8 rollouts a step. The run to calibrate from has exponential
waits of 1 s before its programs, at `max_staleness=4`. Predicted are long-tailed waits (see `slow_tools.py`),
synchronous and asynchronous, and exponential waits of 3 s at `max_staleness=1`. Waits follow from a rollout's seed, so
those of the known run are taken out of its records, and the planner plays each run with the very waits that it had:
with other draws of the long tail, twelve steps take a quarter more or less. Compared is the time from the first call
for a batch to the last push. With `--out` runs that are there already are not repeated. Nothing else may run on the
machine: other work slows the runs unequally.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

from slow_tools import Latency, long_tailed, workflow_with

from areal_agent.config import Config
from areal_agent.files import RunFolder
from areal_agent.ledger.files import reading
from areal_agent.ledger.questions import TurnTime, turn_times
from areal_agent.plan.calibration import groups_of, layout_of, of_run
from areal_agent.plan.simulation import Episode, simulate
from areal_agent.rollout.runner import rollout_seed
from areal_agent.run import Run

ROOT = Path(__file__).parents[2]
SEEDS = range(20)
SECONDS = "seconds.txt"


@dataclass(frozen=True, slots=True)
class Case:
    """A run's tool waits and staleness bound."""

    latency: Latency
    max_staleness: int

    def config(self, run_dir: Path, steps: int) -> Config:
        settings = ["eval.num_tasks=0", "rollout.max_concurrent=128", f"max_staleness={self.max_staleness}"]
        return Config.load(ROOT / "configs" / "quickstart.yaml", [*settings, f"steps={steps}", f"run_dir={run_dir}"])

    def waits(self, group: str, sibling: int) -> Iterator[float]:
        """Yield the waits of one rollout, one after the other."""
        generator = random.Random(rollout_seed(0, group, str(sibling)))
        while True:
            yield self.latency(generator)


KNOWN = Case(lambda generator: generator.expovariate(1 / 1.0), 4)
CASES = {
    "long-tailed, synchronous": Case(long_tailed, 0),
    "long-tailed, max_staleness 4": Case(long_tailed, 4),
    "exponential 3 s, max_staleness 1": Case(lambda generator: generator.expovariate(1 / 3.0), 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/async/planned.py", description="Planned against measured.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = (args.out or Path(scratch)).resolve()
        seconds = {
            name: measured(case, out / f"run-{number}", args.steps) for number, (name, case) in enumerate(cases())
        }
        calibration = of_run(out / "run-0", KNOWN.config(out / "run-0", args.steps))
        with reading(RunFolder(out / "run-0").ledger) as ledger:
            groups = groups_of(list(without_waits(turn_times(ledger))))
    print("\n".join(calibration.told))
    print("| run | measured s | planned s | off by |\n|---|---|---|---|")
    for name, case in cases():
        layout = layout_of(case.config(out, args.steps), num_servers=1)
        planned = fmean(
            simulate(replace(calibration.costs, groups=Played(groups, case, seed)), layout, args.steps, seed).ends[-1]
            for seed in SEEDS
        )
        print(f"| {name} | {seconds[name]:.1f} | {planned:.1f} | {planned / seconds[name] - 1:+.0%} |", flush=True)
    return 0


def cases() -> list[tuple[str, Case]]:
    return [("exponential 1 s, max_staleness 4 (calibrated)", KNOWN), *CASES.items()]


def measured(case: Case, folder: Path, steps: int) -> float:
    """Run the loop once, unless `folder` has it; return its seconds."""
    path = folder / SECONDS
    if not path.is_file():
        seconds = asyncio.run(loop(case, folder, steps))
        path.write_text(str(seconds))
        print(f"{folder}: {seconds:.1f} s at a load of {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return float(path.read_text())


async def loop(case: Case, folder: Path, steps: int) -> float:
    async with Run(case.config(folder, steps), workflow=workflow_with(case.latency)) as run:
        started_s = time.perf_counter()
        while run.step < steps:
            await run.train_step(await run.prepare_batch())
            await run.push()
        seconds = time.perf_counter() - started_s
        await run.stop_producing()
        await run.settle(is_completed=True)
    return seconds


def without_waits(turns: Sequence[TurnTime]) -> Iterator[TurnTime]:
    """Yield the turns of the known run as they would have been without its waits."""
    for session, of_session in groupby(turns, key=lambda turn: turn.session_id):
        group, _, sibling = session.rpartition("-")
        mine = list(of_session)
        drawn = KNOWN.waits(group, int(sibling))
        waited = [0.0, *(next(drawn) for _ in mine[1:])]
        for number, turn in enumerate(mine, start=1):
            before_s, in_all_s = sum(waited[:number]), sum(waited)
            yield turn._replace(
                started_s=turn.started_s - before_s,
                ended_s=turn.ended_s - before_s,
                session_ended_s=turn.session_ended_s - in_all_s,
            )


class Played(Sequence[Sequence[Episode]]):
    """Recorded groups with the waits of a case: the n-th that is asked for, under whatever number, has the n-th's."""

    def __init__(self, recorded: Sequence[Sequence[Episode]], case: Case, seed: int) -> None:
        self._recorded = recorded
        self._case = case
        self._random = random.Random(seed)
        self._number = 0

    def __len__(self) -> int:
        return len(self._recorded)

    def __getitem__(self, _: object) -> Sequence[Episode]:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = f"g{self._number:06d}"
        self._number += 1
        return [self._waiting(one, group, sibling) for sibling, one in enumerate(self._random.choice(self._recorded))]

    def _waiting(self, episode: Episode, group: str, sibling: int) -> Episode:
        first, *between, last = episode
        waits = self._case.waits(group, sibling)
        return [first, *(replace(turn, wait_s=turn.wait_s + next(waits)) for turn in between), last]


if __name__ == "__main__":
    sys.exit(main())
