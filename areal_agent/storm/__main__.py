"""`python -m areal_agent.storm --faults 10000 --seed 0`: a run's control plane under faults, on simulated machines."""

import argparse
import contextlib
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import TypeVar

from areal_agent.cluster.local import MEMORY
from areal_agent.command import Parser, nearest, run_command
from areal_agent.errors import ProcessDied
from areal_agent.process import how_it_ended
from areal_agent.storm.faults import KINDS, Fault, draw_faults, shrink
from areal_agent.storm.story import Told, tell

T = TypeVar("T")

FAULTS_A_STORY = 50
MAX_FAULTS = 10_000_000
MAX_SEED = 2**31 - 1 - MAX_FAULTS // FAULTS_A_STORY
"""The seed of the first story: that of the last one is a config's, which is below 2**31."""
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STORY_LIMIT_S = 300.0
"""The real time of one story, which takes seconds: one that spins while its clock stands still would take for ever."""


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    arguments = parser.parse_args(words)
    for name, least in (("faults", 1), ("jobs", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} is {getattr(arguments, name)}; give {least} or more")
    for name, most in (("faults", MAX_FAULTS), ("seed", MAX_SEED)):
        if getattr(arguments, name) > most:
            parser.error(f"--{name} is {getattr(arguments, name)}; give {most} or less")
    for kind in arguments.kinds:
        if kind not in KINDS:
            parser.error(f"there is no kind {kind!r}; {nearest(kind, KINDS)} (in quotes, as each has several words)")
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names have the same order in each process
        module = ["-m", "areal_agent.storm", *words]
        os.execve(sys.executable, [sys.executable, *module], {**os.environ, "PYTHONHASHSEED": "0"})
    for ending in ENDINGS:
        signal.signal(ending, signal.default_int_handler)  # else the folders of stories stay, in memory
    sizes = [FAULTS_A_STORY] * (arguments.faults // FAULTS_A_STORY)
    if rest := arguments.faults % FAULTS_A_STORY:
        sizes.append(rest)
    stories = {arguments.seed + number: size for number, size in enumerate(sizes)}
    return _tell_all(stories, arguments.kinds, arguments.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m areal_agent.storm",
        description="Play runs on simulated machines under a clock of their own, let things go wrong in them, and hold "
        "what the ledger says against what happened. No model, no GPU, no network.",
    )
    parser.add_argument(
        "--faults", type=int, default=1000, metavar="N", help="how many faults, 50 in each story (default: 1000)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="the number of the first story; the next ones have the next numbers (default: 0)",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="stories at once (default: one a core)"
    )
    kinds = ", ".join(f'"{kind}"' for kind in KINDS)
    parser.add_argument("--kinds", nargs="+", default=(), metavar="KIND", help=f"only these kinds of faults: {kinds}")
    return parser


def _tell_all(stories: Mapping[int, int], kinds: Sequence[str], jobs: int) -> int:
    """Tell stories: how many faults each has, by its seed. Return the exit code."""
    began_s = time.monotonic()
    struck: Counter[str] = Counter()
    num_told = num_drawn = num_lives = num_answers = num_steps = 0
    broken: Told | None = None
    is_interrupted = False
    with ThreadPoolExecutor(jobs) as threads:
        running = {threads.submit(apart, _tell, seed, size, kinds): seed for seed, size in stories.items()}
        try:
            for future in as_completed(running):
                try:
                    told = future.result()
                except ProcessDied as error:
                    seed = running[future]
                    raise ProcessDied(f"{error}\n{_again(seed, stories[seed], kinds)}") from None
                struck += told.struck
                num_told, num_drawn = num_told + 1, num_drawn + len(told.faults)
                num_lives, num_answers = num_lives + told.num_lives, num_answers + told.num_answers
                num_steps += told.num_steps
                if told.broken:
                    broken = told
                    break
                if sys.stderr.isatty():
                    print(f"\r{num_told} of {len(stories)} stories", end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # else those that have not begun are waited for
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if broken is not None:
        report(broken, kinds)
        return 1
    for kind, number in struck.most_common():
        print(f"{number:6d}  {kind}")
    print(f"{struck.total():6d}  of {num_drawn} faults found something to strike")
    print(
        f"{num_told} of {len(stories)} stories (seeds {min(stories)} to {max(stories)})"
        f"{', interrupted' if is_interrupted else ''}: {num_lives} processes of runs, {num_steps} train steps and "
        f"{num_answers} answers; every promise held ({time.monotonic() - began_s:.0f} s)"
    )
    return 130 if is_interrupted else 0


def apart(call: Callable[..., T], *arguments: object, limit_s: float = STORY_LIMIT_S) -> T:
    """Return what a call returns in a process of its own, as each story needs.

    Raises ProcessDied if that is killed; it is, where it takes longer than `limit_s`.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    memory = str(MEMORY) if os.access(MEMORY, os.W_OK) else None  # where nobody waits for a disk
    with tempfile.TemporaryDirectory(prefix="storm-", dir=memory) as folder:  # no process that is killed removes it
        process = context.Process(target=_send, args=(there, folder, call, arguments), daemon=True)
        process.start()
        there.close()
        late = ""
        try:
            if not here.poll(limit_s):
                process.kill()
                late = f", as it had not ended within {limit_s:g} s"
            return here.recv()
        except EOFError:
            process.join()
            how = how_it_ended(process.exitcode or 0)
            raise ProcessDied(f"the process of {call.__name__}{arguments!r} {how}{late}") from None
        finally:
            here.close()
            process.join()


def _send(there: Connection, folder: str, call: Callable[..., object], arguments: Sequence[object]) -> None:
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_DFL)  # it is told once, by the parent
    tempfile.tempdir = folder
    there.send(call(*arguments))


def _tell(seed: int, num_faults: int, kinds: Sequence[str]) -> Told:
    return tell(seed, draw_faults(seed, num_faults, kinds))


def report(told: Told, kinds: Sequence[str]) -> None:
    """Print the shortest story that is still broken."""
    print(
        f"story {told.seed} breaks {len(told.broken)} promises with {len(told.faults)} faults; making it shorter ... "
        "(Ctrl-C prints it as it is)",
        flush=True,
    )
    shortest = told

    def fails(faults: Sequence[Fault]) -> bool:
        nonlocal shortest
        again = apart(tell, told.seed, faults)
        if again.broken:
            shortest = again
        return bool(again.broken)

    with contextlib.suppress(KeyboardInterrupt, ProcessDied):  # what was found is told all the same
        shrink(told.faults, fails)
    print("\n".join(shortest.lines))
    for broken in shortest.broken:
        print(f"BROKEN: {broken}")
    print(_again(told.seed, len(told.faults), kinds))


def _again(seed: int, num_faults: int, kinds: Sequence[str]) -> str:
    """Return the command that tells a story again."""
    only = f" --kinds {shlex.join(kinds)}" if kinds else ""
    return f"again: python -m areal_agent.storm --seed {seed} --faults {num_faults}{only}"


if __name__ == "__main__":
    run_command(main)
