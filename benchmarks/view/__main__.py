"""How fast the page of a large run opens and scrolls, and what looking at a run costs it.

    python benchmarks/view [--turns 1000000] [--folder DIR]     makes such a run (once) and opens it in Chromium
    python benchmarks/view --beside [--steps 130]               the quickstart, looked at in every other block of steps

A run of a million turns has 250,000 rollouts of four turns and 3,906 train steps. `--beside` trains once, so that both
sides of the comparison are neighbours in time; the token records of its default share are replayed afterwards, and
their time is compared with that of a step. It needs Chromium, and Linux.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, sync_playwright

from areal_agent.ledger import questions
from areal_agent.ledger.encoding import encode_completion, encode_turn
from areal_agent.ledger.files import FILE_NAME, FileKind, open_for_writing, reading
from areal_agent.observe.metrics import MetricsLog, read_metrics, step_rows
from areal_agent.observe.token_records import SeenTokens, TokenRecorder, read_seen
from areal_agent.process import ENDING_WITH_US
from areal_agent.types import Completion, Distribution, FinishReason, SamplingParams, Turn, VersionSpan, WeightVersion

ROOT = Path(__file__).parents[2]
TURNS_OF_SESSION, SESSIONS_OF_STEP, SIBLINGS = 4, 64, 8
ANSWER_TOKENS, PROMPT_TOKENS, NUM_METRICS = 60, 30, 90
WARM_UP, BLOCK = 6, 4
"""Steps that are not counted, and those of a block."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FRAMES = """async () => {
  const box = document.querySelector(".rows"), gaps = [];
  let before = await new Promise(requestAnimationFrame);
  for (let at = 0; at < 300; at++) {
    box.scrollTop += 240;
    const now = await new Promise(requestAnimationFrame);
    gaps.push(now - before);
    before = now;
  }
  return gaps.sort((a, b) => a - b);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "areal_agent_view")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    with sync_playwright() as playwright, closing(playwright.chromium.launch(
        executable_path=args.chromium, args=FLAGS
    )) as browser:  # fmt: skip
        if args.beside:
            beside(browser, args.steps)
        else:
            run = args.folder / f"turns_{args.turns}"
            if not (run / "metrics.jsonl").exists():
                make_run(run, args.turns)
            measure(browser, run)


# ------------------------------------------------------------------------------------------ a large run


def make_run(run: Path, num_turns: int) -> None:
    """Write a completed run, row by row: its ledger, then its metrics, with which it is whole."""
    run.mkdir(parents=True, exist_ok=True)
    num_sessions = num_turns // TURNS_OF_SESSION
    with closing(open_for_writing(run / FILE_NAME, FileKind.COORDINATOR, create=True)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        for table, rows in {
            "sessions": sessions(num_sessions),
            "turns": turns(num_sessions),
            "completions": completions(num_sessions),
            "endings": endings(num_sessions),
            "leases": ((f"s{at}", 1 + at // SESSIONS_OF_STEP, "", ANSWER_TOKENS) for at in range(num_sessions)),
            "fates": ((f"s{at}", 1 + at // SESSIONS_OF_STEP, None) for at in range(num_sessions)),
        }.items():
            first = next(rows)
            insert = f"INSERT INTO {table} VALUES ({', '.join('?' * len(first))})"
            connection.execute(insert, first)
            connection.executemany(insert, rows)
        connection.execute("INSERT INTO notes VALUES ('status', '\"completed\"')")
        connection.execute("COMMIT")
    with closing(MetricsLog(run / "metrics.jsonl")) as log:
        for step in range(1, 1 + num_sessions // SESSIONS_OF_STEP):
            many = {f"trainer/metric_{number}": step / (number + 1) for number in range(NUM_METRICS)}
            log.append({"kind": "step", "step": step, "time": step, "reward/mean": step % 100 / 100, **many})


def sessions(count: int) -> Iterator[Sequence[object]]:
    for at in range(count):
        yield at + 1, f"s{at}", f"g{at // SIBLINGS}", f"task {at % 999}", "train", 0, "", float(at)


def turns(count: int) -> Iterator[Sequence[object]]:
    messages = ({"role": "user", "content": "What comes next? " * 8},)
    row = encode_turn(
        Turn(id="", parent=None, fork_at=0, new_prompt_ids=tuple(range(PROMPT_TOKENS)), completions=(),
             request_delta=messages, sampling=SamplingParams(), started_s=1.0, ended_s=2.0)
    )  # fmt: skip
    for at in range(count * TURNS_OF_SESSION):
        session, number = divmod(at, TURNS_OF_SESSION)
        parent, fork_at = (f"c{at - 1}", number * (PROMPT_TOKENS + ANSWER_TOKENS)) if number else (None, 0)
        yield at + 1, session + 1, *row._replace(id=f"t{at}", parent=parent, fork_at=fork_at)


def completions(count: int) -> Iterator[Sequence[object]]:
    size = SESSIONS_OF_STEP * TURNS_OF_SESSION
    for step in range(-(-count // SESSIONS_OF_STEP)):
        span = VersionSpan(version=WeightVersion(step=step), start=0, end=ANSWER_TOKENS)
        row = encode_completion(
            Completion(id="", token_ids=tuple(range(ANSWER_TOKENS)), logprobs=(-0.5,) * ANSWER_TOKENS,
                       versions=(span,), finish_reason=FinishReason.STOP, distribution=Distribution.EXACT)
        )  # fmt: skip
        for at in range(step * size, min(count * TURNS_OF_SESSION, (step + 1) * size)):
            yield at + 1, at + 1, *row._replace(id=f"c{at}")


def endings(count: int) -> Iterator[Sequence[object]]:
    rare = max(1, count // 5)
    for at in range(count):
        status, error = ("error", "it failed") if at % rare == 0 else ("completed", None)
        yield at + 1, at + 1, status, error, float(at % 2), "{}", "{}", "{}", "[]", at + 2.0, ""


# ------------------------------------------------------------------------------------------ its page


@contextmanager
def page_of(run: Path) -> Generator[tuple[str, int]]:
    """Serve the page by the command; its address and the id of its process."""
    command = [*ENDING_WITH_US, sys.executable, "-m", "areal_agent.view", str(run)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def cpu_s(process_id: int) -> float:
    """Return the CPU-seconds of a process until now. Linux only."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(browser: Browser, run: Path) -> None:
    """Open every view of a run and print how long each takes until it shows something."""
    begun_s = time.perf_counter()
    with page_of(run) as (address, server):
        print(f"the command, until it prints an address: {time.perf_counter() - begun_s:.2f} s")
        page = browser.new_page()
        meter = page.context.new_cdp_session(page)
        meter.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU-seconds, whatever else runs

        def spent_s() -> tuple[float, float, float]:
            """Seconds until now: of the clock, of CPU in the page's thread, and of CPU in the server."""
            metrics = {one["name"]: one["value"] for one in meter.send("Performance.getMetrics")["metrics"]}
            return time.perf_counter(), metrics["TaskDuration"], cpu_s(server)

        for what, place, ready in (
            ("the page, from its address to the curves", "", "figure"),
            ("rollouts, the first rows", "#/rollouts/0", ".rows .row"),
            ("a filter that five of all rollouts pass", "#/rollouts/0?status=error", ".rows .row:nth-child(5)"),
            ("the rollouts of a step long ago", "#/rollouts/0?step=3", ".rows .row"),
            ("a rollout", "#/rollout/0/s1000", ".turn"),
            ("its tokens", "#/tokens/0/s1000/t4000", ".token"),
            ("a text that none of the newest 10,000 rollouts has", "#/rollouts/0?text=nowhere", "text=10,000 read"),
        ):
            before = spent_s()
            page.goto(address + place)
            page.locator(ready).first.wait_for(timeout=300_000)
            took, page_s, server_s = (now - then for now, then in zip(spent_s(), before, strict=True))
            print(f"{what}: {took:.2f} s (busy: the page {page_s:.2f} s, the server {server_s:.2f} s)", flush=True)
        page.goto(f"{address}#/rollouts/0")
        page.locator(".rows .row").first.wait_for()
        gaps: list[float] = page.evaluate(FRAMES)
        print(
            f"scrolling, ms between frames: median {gaps[len(gaps) // 2]:.0f}, 99% {gaps[-3]:.0f}, most {gaps[-1]:.0f}"
        )


# ------------------------------------------------------------------------------------------ beside a run


def beside(browser: Browser, num_steps: int) -> None:
    """Train, look at it in every other block of steps, and print what a block costs, and what keeping tokens costs."""
    run = Path(tempfile.mkdtemp(prefix="areal_agent_beside_")) / "run"
    command = [sys.executable, "-m", "areal_agent.train", "--config", "configs/quickstart.yaml", f"run_dir={run}"]
    with subprocess.Popen(
        [*ENDING_WITH_US, *command, f"steps={num_steps}", "eval.num_tasks=0"], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        blocks = list(look(browser, run, process))
    assert process.returncode == 0, f"the run ended with {process.returncode}; see {run / 'logs'}"
    alone, watched = blocks[0::2], blocks[1::2]
    print(f"{len(alone)} blocks alone, {len(watched)} looked at; medians, and quartiles")
    for what in blocks[0]:
        sides = [statistics.quantiles([block[what] for block in side], n=4) for side in (alone, watched)]
        print(
            f"{what}: " + ", looked at ".join(f"{middle:.4f} ({low:.4f} to {high:.4f})" for low, middle, high in sides)
        )
    print_recorder(run, statistics.median(block["seconds a step"] for block in blocks))


def look(browser: Browser, run: Path, process: subprocess.Popen[bytes]) -> Iterator[Mapping[str, float]]:
    """Yield what each block of steps took; in every second one a browser has the page open, which asks for news."""

    def steps_to(count: int) -> list[dict[str, Any]]:
        while process.poll() is None:
            if (run / "metrics.jsonl").exists() and len(
                rows := step_rows(read_metrics(run / "metrics.jsonl"))
            ) >= count:
                return rows[count - BLOCK : count]
            time.sleep(0.02)
        return []

    count = WARM_UP
    steps_to(count)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    trainer = next(int(one) for one in children if "areal_agent.trainer" in Path(f"/proc/{one}/cmdline").read_text())
    with page_of(run) as (address, server), closing(browser.new_page()) as page:
        for place in itertools.cycle(["", f"{address}#/", "", f"{address}#/rollouts/0"]):
            trainer_s, server_s, begun_s = cpu_s(trainer), cpu_s(server), time.perf_counter()
            page.goto(place or "about:blank")
            count += BLOCK
            if not (rows := steps_to(count)):
                return
            tokens, updates_s, wall_s = (
                sum(row[name] for row in rows) for name in ("tokens/trained", "trainer/seconds_update", "seconds/wall")
            )
            yield {
                "CPU-seconds of the trainer, 1,000 tokens": (cpu_s(trainer) - trainer_s) / tokens * 1000,
                "seconds of updates, 1,000 tokens": updates_s / tokens * 1000,
                "seconds a step": wall_s / BLOCK,
                "CPU-seconds of the page's server, a second": (cpu_s(server) - server_s)
                / (time.perf_counter() - begun_s),
            }


def print_recorder(run: Path, step_s: float) -> None:
    """Replay what the run kept through a recorder, and then what a step of a million tokens would."""
    with reading(run / FILE_NAME) as snapshot:
        leased = [(step, session) for session, step in questions.leases(snapshot, 0, 10**9).items()]
    steps = {step: [name for one, name in leased if one == step] for step, _ in leased}
    kept = {step: {name: read_seen(run, step, name) for name in names} for step, names in steps.items()}
    times = [replayed(0.05, branches, run.parent, step) for step, branches in kept.items()]
    print(f"keeping tokens, a step of this run: {statistics.median(times) * 1000:.1f} ms of {step_s * 1000:.0f} ms, "
          f"{statistics.median(times) / step_s:.2%}")  # fmt: skip
    columns = (np.arange(2000, dtype=np.int32), *np.random.default_rng(0).normal(size=(3, 2000)).astype(np.float32))
    large = {f"g{number // 8}-{number % 8}": {0: SeenTokens(*columns)} for number in range(512)}
    times = [replayed(0.05, large, run.parent, step) for step in range(9)]
    print(f"keeping tokens, a step of 512 rollouts of 2,000 tokens: {statistics.median(times) * 1000:.1f} ms")


def replayed(share: float, seen: Mapping[str, Mapping[int, SeenTokens]], folder: Path, step: int) -> float:
    """Return the seconds that a recorder takes to choose, keep and write a step."""
    recorder, begun_s = TokenRecorder(folder / "replayed", share), time.perf_counter()
    for session_id, branches in seen.items():
        if recorder.keeps(session_id):
            for branch, one in branches.items():
                recorder.add(session_id, branch, one)
    recorder.write(step)
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    main()
