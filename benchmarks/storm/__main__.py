"""Kills and freezes the processes of a running quickstart, again and again, and proves what is left.

    python benchmarks/storm [--kills 1000] [--every-s 1] [--seed 0] [--out DIR] [--dockerd COMMAND] [key=value ...]

Each round is a run of two engines, two workers with a gateway each, and two ranks of the trainer. At random moments one
of its processes, its main process included, gets SIGKILL, or SIGSTOP and some seconds later SIGCONT; each kind as
often, where one lives soon. A run that ends is resumed at once. When its steps are done it has to have `completed` with
all of them, `ledger verify` has to prove its ledger, and `ledger replay` to make the weights of its last step again.
Rounds follow until all kills are done. `--dockerd` is the command that starts the Docker engine, which is then killed,
too (with `--config configs/code_docker.yaml`), and started again. A fifth of the signals are left alone until a step is
done; the others may find the run on its way back. The table: by kind, how often it was hit; of those left alone, how
often the run ended and was resumed, and the seconds until the next step was done. Below it are the errors that runs
ended with. The exit status is 1 if a proof failed; a run that does not go on, or ends again and again, ends it, too.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import psutil

from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.process import ENDING_WITH_US

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "engine.num_servers=2",
    "rollout.workers=2",
    "trainer.num_ranks=2",
    "trainer.checkpoint_every=2",
    "eval.num_tasks=0",
    "observe.progress=none",
)
PROGRAMS = {  # what the command of a process of each kind has in it
    "engine": "areal_agent.engine",
    "trainer": "areal_agent.trainer",
    "worker": "areal_agent.rollout.worker",
    "forker": "sys.modules['sandboxes']",
}
MAIN, DOCKERD = "main", "dockerd"
FREEZE_S = (1.0, 20.0)
SHARE_OF_FREEZES = 0.3
SHARE_LEFT_ALONE = 0.2
POLL_S = 0.2
START_S = 15.0
"""So long a signal waits for a process of its kind: a run that is resumed has its main process alone at first."""
DEADLINE_S = 600.0
"""For a run that gets no further fault: until its next step."""
MAX_VAIN_STARTS = 3
"""In a row, each without a signal or a step since the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One signal, and what came of it."""

    kind: str
    is_freeze: bool
    until_step_s: float | None  # None: it was not left alone
    has_ended: bool = False  # it was left alone, and the run ended and was resumed


@dataclass(kw_only=True)
class DockerEngine:
    """The Docker engine, which is started whenever it has ended, as a machine's init does. Without a command: none."""

    command: Sequence[str]
    _process: "subprocess.Popen[bytes] | None" = None

    def processes(self) -> list[psutil.Process]:
        """Return the living ones."""
        found = psutil.process_iter(["name", "status"]) if self.command else ()
        return [one for one in found if one.info["name"] == DOCKERD and one.info["status"] != psutil.STATUS_ZOMBIE]

    def keep(self) -> None:
        if self._process is not None:
            self._process.poll()  # the next one does not start while a dead child has the number in its file
        if self.command and not self.processes():
            self._process = subprocess.Popen(
                self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )


@dataclass(kw_only=True)
class Storm:
    """A round: one run, and the signals that its processes get."""

    run_dir: Path
    config: Path
    overrides: Sequence[str]
    chance: random.Random
    docker: DockerEngine
    hits: list[Hit] = field(default_factory=list[Hit])
    num_resumes: int = 0
    _starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # signals and steps before each
    _main: "subprocess.Popen[bytes] | None" = None

    def play(self, num_kills: int, every_s: float) -> None:
        """Let the run go on under faults, then in peace, until its steps are done. Exits if it stands still."""
        self._start()
        while not self._is_completed():
            self._wait(self.chance.expovariate(1 / every_s))
            if self._has_ended():
                self._start()
            elif len(self.hits) < num_kills:
                self._hit()
            else:
                self._wait_for_a_step()

    def _start(self) -> None:
        self._starts.append((len(self.hits), self.step()))
        if len(self._starts) > MAX_VAIN_STARTS and len({*self._starts[-MAX_VAIN_STARTS - 1 :]}) == 1:
            self._give_up("it ends by itself, again and again")
        given = ["--resume", str(self.run_dir)] if (self.run_dir / "config.yaml").exists() else None
        self.num_resumes += given is not None
        first = ["--config", str(self.config), f"run_dir={self.run_dir}", *SETTINGS, *self.overrides]
        command = [*ENDING_WITH_US, sys.executable, "-m", "areal_agent.train", *(given or first)]
        with self.run_dir.with_suffix(".log").open("ab") as log:
            self._main = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def _give_up(self, why: str) -> NoReturn:
        said = self.run_dir.with_suffix(".log").read_text(errors="replace")
        sys.exit(f"{self.run_dir}: {why}; its log ends with:\n{said[-1000:]}")

    def _has_ended(self) -> bool:
        assert self._main is not None
        return self._main.poll() is not None

    def _is_completed(self) -> bool:
        summary = self.run_dir / "summary.json"
        return self._has_ended() and summary.exists() and json.loads(summary.read_text())["status"] == "completed"

    def _wait(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._has_ended():
            self.docker.keep()
            time.sleep(POLL_S)

    def _hit(self) -> None:
        """Choose a kind, and one process of it; a frozen one goes on after a while."""
        kind = self.chance.choice((MAIN, *PROGRAMS, *[DOCKERD] * bool(self.docker.command)))
        until_s = time.monotonic() + START_S
        while kind not in (by_kind := self._processes()) and time.monotonic() < until_s:
            self._wait(POLL_S)
            if self._has_ended():
                return
        if kind not in by_kind:
            kind = self.chance.choice(sorted(by_kind))
        victim, is_freeze = self.chance.choice(by_kind[kind]), self.chance.random() < SHARE_OF_FREEZES
        started_s, step = time.monotonic(), self.step()
        try:
            if is_freeze:
                victim.suspend()
                self._wait(self.chance.uniform(*FREEZE_S))
                victim.resume()
            else:
                victim.kill()
        except psutil.NoSuchProcess:
            return
        hit, resumes = Hit(kind=kind, is_freeze=is_freeze, until_step_s=None), self.num_resumes
        if self.chance.random() < SHARE_LEFT_ALONE and self._wait_for_a_step(step):
            has_ended, until_step_s = self.num_resumes > resumes, time.monotonic() - started_s
            hit = replace(hit, has_ended=has_ended, until_step_s=until_step_s)
        self.hits.append(hit)
        what = "frozen" if is_freeze else "killed"
        print(f"{len(self.hits)}: {kind} {what} at step {step}", flush=True)

    def _processes(self) -> dict[str, list[psutil.Process]]:
        """Return the living processes of the run, by kind."""
        assert self._main is not None
        main = psutil.Process(self._main.pid)
        found: dict[str, list[psutil.Process]] = {MAIN: [main]}
        for process in main.children(recursive=True):
            for kind, mark in PROGRAMS.items():
                with contextlib.suppress(psutil.Error):
                    if mark in " ".join(process.cmdline()):
                        found.setdefault(kind, []).append(process)
                        break
        found[DOCKERD] = self.docker.processes()
        return {kind: processes for kind, processes in found.items() if processes}

    def step(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return max((row["step"] for row in step_rows(read_metrics(file))), default=0) if file.exists() else 0

    def _wait_for_a_step(self, step: int | None = None) -> bool:
        """Wait until a further step is done, resuming a run that ends. Return False when the run is completed."""
        step = self.step() if step is None else step
        deadline_s = time.monotonic() + DEADLINE_S
        while self.step() <= step:
            if self._is_completed():
                return False
            if self._has_ended():
                self._start()
            if time.monotonic() > deadline_s:
                self._give_up(f"no step after {step} within {DEADLINE_S:g} s")
            self._wait(POLL_S)
        return True


def main() -> int:
    args = _parse()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    chance, docker = random.Random(args.seed), DockerEngine(command=shlex.split(args.dockerd))
    hits: list[Hit] = []
    ends: Counter[str] = Counter()
    is_proved = True
    with _folder(args.out) as out:
        number = 0
        while len(hits) < args.kills:
            storm = Storm(
                run_dir=out / f"round{number}",
                config=args.config,
                overrides=[f"steps={args.steps}", f"seed={args.seed + number}", *args.overrides],
                chance=chance,
                docker=docker,
            )
            storm.play(args.kills - len(hits), args.every_s)
            hits += storm.hits
            proofs = {name: proved(name, storm.run_dir) for name in ("verify", "replay")}
            proofs["number of steps"] = storm.step() == args.steps
            ends += ends_of(storm.run_dir)
            is_proved &= all(proofs.values())
            told = ", ".join(f"{name} {'holds' if holds else 'FAILED'}" for name, holds in proofs.items())
            print(f"round {number}: {len(storm.hits)} faults, {storm.num_resumes} resumes; {told}", flush=True)
            number += 1
    print("\n" + table(hits, [MAIN, *PROGRAMS, *[DOCKERD] * bool(args.dockerd)]) + "\n")
    print("\n".join(f"{number:4d}  {end}" for end, number in ends.most_common()))
    return 0 if is_proved else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/storm", description="Kills processes of a running quickstart."
    )
    parser.add_argument("--kills", type=int, default=1000, help="signals in all")
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between two signals, on average")
    parser.add_argument(
        "--steps", type=int, default=30, help="of a run; another run follows until all signals are sent"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--out", type=Path, help="keep the run folders there")
    parser.add_argument("--dockerd", default="", metavar="COMMAND", help="kill the Docker engine, too; this starts it")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills is {args.kills}; give 1 or more")
    return args


@contextlib.contextmanager
def _folder(out: Path | None) -> Generator[Path]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out.resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def proved(command: str, run_dir: Path) -> bool:
    ledger = [*ENDING_WITH_US, sys.executable, "-m", "areal_agent.ledger", command, str(run_dir)]
    with run_dir.with_suffix(f".{command}").open("wb") as log:
        return subprocess.run(ledger, cwd=ROOT, stdout=log, stderr=log, check=False).returncode == 0


def ends_of(run_dir: Path) -> Counter[str]:
    """Count the errors with which a run ended, without numbers and what follows."""
    errors = re.findall(r"^(error: .*|Traceback .*)$", run_dir.with_suffix(".log").read_text(errors="replace"), re.M)
    return Counter(re.sub(r"\d+", "N", error.partition(";")[0]) for error in errors)


def table(hits: Sequence[Hit], kinds: Sequence[str]) -> str:
    """Lay out the hits by kind and signal, also of kinds that were never there."""
    columns = ("process", "signal", "hits", "left alone", "the run ended", "s to the next step, median", "at most")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for kind, is_freeze in itertools.product(sorted(kinds), (False, True)):
        of_it = [hit for hit in hits if (hit.kind, hit.is_freeze) == (kind, is_freeze)]
        seconds = [hit.until_step_s for hit in of_it if hit.until_step_s is not None]
        cells = [kind, "SIGSTOP" if is_freeze else "SIGKILL", str(len(of_it)), str(len(seconds))]
        cells += [str(sum(hit.has_ended for hit in of_it))]
        cells += [f"{statistics.median(seconds):.0f}", f"{max(seconds):.0f}"] if seconds else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
