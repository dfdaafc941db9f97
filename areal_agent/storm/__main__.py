"""`python -m areal_agent.storm --faults 10000 --seed 0`: a run's control plane under faults, on simulated machines."""

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from areal_agent.command import Parser, run_command
from areal_agent.storm.faults import KINDS, Fault, draw_faults, shrink
from areal_agent.storm.story import Told, tell

FAULTS_A_STORY = 50


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    arguments = parser.parse_args(words)
    for name in ("faults", "jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; give 1 or more")
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names have the same order in each process
        module = ["-m", "areal_agent.storm", *words]
        os.execve(sys.executable, [sys.executable, *module], {**os.environ, "PYTHONHASHSEED": "0"})
    sizes = [FAULTS_A_STORY] * (arguments.faults // FAULTS_A_STORY)
    if rest := arguments.faults % FAULTS_A_STORY:
        sizes.append(rest)
    stories = [(arguments.seed + number, size, arguments.kinds) for number, size in enumerate(sizes)]
    return _tell_all(stories, arguments.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m areal_agent.storm",
        description="Play runs on simulated machines under a clock of their own, let things go wrong in them, and hold "
        "what the ledger says against what happened. No model, no GPU, no network.",
    )
    parser.add_argument("--faults", type=int, default=1000, help="how many faults, 50 in each story (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first story; the next ones have the next numbers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="stories at once (default: all cores)")
    parser.add_argument(
        "--kinds", nargs="+", choices=sorted(KINDS), default=(), metavar="KIND", help="only these kinds of faults"
    )
    return parser


def _tell_all(stories: Sequence[tuple[int, int, Sequence[str]]], jobs: int) -> int:
    began_s = time.monotonic()
    struck: Counter[str] = Counter()
    num_lives = num_answers = num_steps = num_told = 0
    with open_pool(jobs) as pool:
        for told in pool.imap_unordered(_tell, stories):
            struck += told.struck
            num_told += 1
            num_lives, num_answers = num_lives + told.num_lives, num_answers + told.num_answers
            num_steps += told.num_steps
            if told.broken:
                pool.terminate()
                _report(told)
                return 1
            if sys.stderr.isatty():
                print(f"\r{num_told} of {len(stories)} stories", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for kind, number in struck.most_common():
        print(f"{number:6d}  {kind}")
    print(
        f"{struck.total():6d}  faults in {len(stories)} stories, {num_lives} processes of runs, {num_steps} train "
        f"steps and {num_answers} answers: every promise held ({time.monotonic() - began_s:.0f} s)"
    )
    return 0


def open_pool(jobs: int) -> Any:
    """Return a pool in which each story has a process of its own."""
    importlib.import_module("openai.resources")  # a client's first call does so, a second in each process
    return multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1)


def _tell(story: tuple[int, int, Sequence[str]]) -> Told:
    seed, num_faults, kinds = story
    return tell(seed, draw_faults(seed, num_faults, kinds))


def _tell_with(story: tuple[int, Sequence[Fault]]) -> Told:
    return tell(*story)


def _report(told: Told) -> None:
    """Print the shortest story that is still broken."""
    print(f"story {told.seed} breaks {len(told.broken)} promises with {len(told.faults)} faults; making it shorter ...")
    shortest = told

    def fails(faults: Sequence[Fault]) -> bool:
        nonlocal shortest
        with open_pool(1) as pool:
            again: Told = pool.apply(_tell_with, ((told.seed, faults),))
        if again.broken:
            shortest = again
        return bool(again.broken)

    shrink(told.faults, fails)
    print("\n".join(shortest.lines))
    for broken in shortest.broken:
        print(f"BROKEN: {broken}")
    print(f"again: python -m areal_agent.storm --seed {told.seed} --faults {len(told.faults)}")


if __name__ == "__main__":
    run_command(main)
