"""How fast the page of a large run opens and scrolls, and what looking at a run costs it.

    python benchmarks/view [--turns 1000000] [--folder DIR]     makes such a run (once) and opens it in Chromium
    python benchmarks/view --beside [--steps 15]                the quickstart alone, recording tokens, and looked at

A run of a million turns has 250,000 rollouts of four turns and 3,906 train steps. `--beside` runs the quickstart three
times: without token records, with those of its default share, and with them while a browser has its page open. It
compares the median time of a train step and the CPU-seconds of the server. It needs Chromium, and Linux.
"""

import argparse
import json
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

from playwright.sync_api import Browser, sync_playwright

from areal_agent.ledger.encoding import encode_completion, encode_turn
from areal_agent.ledger.files import FILE_NAME, FileKind, open_for_writing
from areal_agent.observe.metrics import MetricsLog, read_metrics, step_rows
from areal_agent.types import Completion, Distribution, FinishReason, SamplingParams, Turn, VersionSpan, WeightVersion

ROOT = Path(__file__).parents[2]
TURNS_OF_SESSION, SESSIONS_OF_STEP, SIBLINGS = 4, 64, 8
ANSWER_TOKENS, PROMPT_TOKENS, NUM_METRICS = 60, 30, 90
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
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    with sync_playwright() as playwright, closing(playwright.chromium.launch(
        executable_path=args.chromium, args=FLAGS
    )) as browser:  # fmt: skip
        if args.beside:
            compare(browser, args.folder, args.steps)
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
    command = [sys.executable, "-m", "areal_agent.view", str(run)]
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


def compare(browser: Browser, folder: Path, num_steps: int) -> None:
    """Run the quickstart three times and print the time of its train steps."""
    for name, share, is_watched in (("alone", 0.0, False), ("recording", 0.05, False), ("watched", 0.05, True)):
        run = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=folder if folder.exists() else None)) / "run"
        command = [sys.executable, "-m", "areal_agent.train", "--config", "configs/quickstart.yaml"]
        options = [f"run_dir={run}", f"steps={num_steps}", f"observe.token_records={share}", "eval.num_tasks=0"]
        with subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            cpu_s = watch(browser, run, process) if is_watched else 0.0
        times = median_times(read_metrics(run / "metrics.jsonl"))
        print(json.dumps({"run": name, "exit": process.returncode, "server_cpu_s": round(cpu_s, 2), **times}))


def watch(browser: Browser, run: Path, process: subprocess.Popen[bytes]) -> float:
    """Keep the page of a run open, on its curves and its rollouts in turn; return the server's CPU-seconds."""
    while not (run / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.5)
    with page_of(run) as (address, server):
        page = browser.new_page()
        while process.poll() is None:
            for place in ("#/", "#/rollouts/0"):
                page.goto(address + place)
                page.wait_for_timeout(5000)
        return cpu_s(server)


def median_times(rows: list[dict[str, Any]]) -> Mapping[str, float]:
    steps = step_rows(rows)[2:]  # without those that warm up
    names = {"step_s": "seconds/wall", "update_s": "trainer/seconds_update"}
    return {short: round(statistics.median(row[name] for row in steps), 4) for short, name in names.items()}


if __name__ == "__main__":
    main()
