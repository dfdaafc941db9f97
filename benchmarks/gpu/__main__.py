"""All that only a GPU can show, in two calls of at most 4.5 minutes: results.json and results.md in a folder OUT.

    benchmarks/gpu/wheels                                     # with network: what the GPU's machine lacks
    benchmarks/gpu/run OUT --call 1                           # on the GPU's machine, whose python3 has torch
    benchmarks/gpu/run OUT --call 2                           # or both, without --call
    benchmarks/gpu/run OUT --device cpu --shapes tiny         # the same code on a CPU, which is a test

The first call measures engine and trainer with random weights, the second runs of the real model beside TRL. On a GPU
the parts run in an environment of this Python's packages and those of .wheels, if there is such a folder; else in this
Python's own. Each part is a process with a time limit. At its limit, every process that it started first writes where
it is to its log, and is then killed. The most telling parts come first, and the results are written after each of them.
A part that the whole time leaves less than half of its limit does not run. This file needs nothing but Python.
"""

import argparse
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".wheels"
PARTS = (WHEELS / "smollm2.part1", ROOT / ".smollm2" / "smollm2.part2")
"""The package of the real model, cut in two: what may be carried to a GPU's machine at once may be limited."""
CALL_S = 260.0
MARK = "AREAL_AGENT_GPU_PART"
"""The variable by which all processes of a part are found, also those in sessions of their own."""
DYING_S = 5.0
MAX_OUTPUT, MAX_TRACEBACKS, SHOWN_LINES = 200_000, 50, 80
TRACEBACK = re.compile(
    r"^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)+.*|^.*\(most recent call first\):\n(?:[ \t].*\n)+", re.M
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One command, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    limit_s: float
    call: int = 0  # 0: of both


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a part showed: `rows` are those of its tables, by column; `output` is the end of what it printed."""

    name: str
    command: str
    state: str = "not run"  # or "passed", "failed", "timed out"
    seconds: float = 0.0
    rows: Sequence[Mapping[str, str]] = ()
    tracebacks: Sequence[str] = field(default=(), repr=False)  # of its output and of all logs that it left
    output: str = field(default="", repr=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run", description="All that only a GPU can show.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of results.json and results.md")
    parser.add_argument(
        "--call", type=int, choices=(1, 2), help="which half of the parts (default: one after the other)"
    )
    parser.add_argument("--shapes", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=CALL_S, help="of a call (default %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts by name, such as tests or trainer")
    args = parser.parse_args()
    deadline_s = time.monotonic() + args.seconds * (1 if args.call else 2)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is then ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        python, settings = sys.executable, {"OMP_NUM_THREADS": "1"}
        if args.device == "cuda":
            settings = {}
            if WHEELS.is_dir():
                python, settings = environment(scratch / "venv"), {"AREAL_AGENT_CACHE": str(WHEELS)}  # its tiny model
        parts = parts_of(python, args.device, args.shapes == "tiny", scratch / "smollm2")
        parts = [one for one in parts if not (args.call and one.call) or one.call == args.call]
        parts = [one for one in parts if not args.only or one.name in args.only]
        results = {part.name: Result(name=part.name, command=" ".join(part.command)) for part in parts}
        about = machine()
        for part in parts:
            limit_s = min(part.limit_s, deadline_s - time.monotonic())
            if limit_s >= part.limit_s / 2:
                results[part.name] = run_part(part, scratch / part.name, limit_s, settings)
            write(args.out, about, [*results.values()])
            done = results[part.name]
            print(f"{done.name}: {done.state}, {done.seconds:.0f} s", flush=True)
    print((args.out / "results.md").read_text())
    return 0 if all(one.state == "passed" for one in results.values()) else 1


def environment(folder: Path) -> str:
    """Return the Python of a new environment, in which the packages of this Python come after its own."""
    venv.create(folder, system_site_packages=True)
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text("\n".join(ours))  # this Python may be of an environment itself
    return str(folder / "bin" / "python")


def parts_of(python: str, device: str, is_tiny: bool, model: Path) -> list[Part]:
    """Return all parts, the most telling of each call first. `model` will be the folder of the real one."""
    here, of_device = ROOT / "benchmarks", ["--device", device]
    wheels = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    wheels += ["-r", str(WHEELS / "requirements.txt")]
    cuda = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.cuda" in path.read_text()]
    pytest = ["-m", "pytest", "-v", "--tb=native", "-n", "0", "-m", "cuda and not slow", "-p", "no:cacheprovider"]
    engine = [str(here / "engine" / "gpu.py"), *of_device, "--without-generate", "--rounds", "1", "--long", "0"]
    trainer = [str(here / "trainer" / "gpu.py"), *of_device]
    of_model = [str(here / "gpu" / "model.py"), str(model), *(["--tiny"] if is_tiny else map(str, PARTS))]
    training = [str(here / "gpu" / "training.py"), *of_device]
    real = [*training, "--real", f"model={model}"]
    trl = [str(here / "gpu" / "beside_trl.py"), *of_device, f"model={model}"]
    engine_shapes, trainer_shapes = (["tiny"], ["tiny"]) if is_tiny else (["135M", "0.6B"], ["0.6B", "1.7B"])
    rows, rates = ["--requests", "64", "1", "512"], ["--steps", "3"]
    of_64, quickstart, steps_of_trl = list[str](), ["steps=20", "eval.num_tasks=100"], "steps=10"
    of_512 = ["steps=12", "batch_size=64", "rollout.max_concurrent=512", "engine.max_running_requests=512"]
    if device == "cpu":
        rows, rates = ["--requests", "2"], ["--steps", "1", "--tokens", "128", "--length", "32"]
        of_64, steps_of_trl = ["steps=2", "batch_size=2", "group_size=4", "eval.num_tasks=2"], "steps=2"
        of_512, quickstart = [*of_64, "batch_size=4"], [*of_64, "eval.num_tasks=0"]
    engines = [
        (1, f"engine-{shape}", 75, [*engine, *rows, "--shapes", shape, "--pushes", "0" if shape == "135M" else "2"])
        for shape in engine_shapes
    ]
    told = [
        (0, "setup", 60, wheels),
        engines[0],
        (1, "trainer", 110, [*trainer, *rates, "--shapes", *trainer_shapes]),
        (1, "tests", 75, [*pytest, *cuda]),
        *engines[1:],
        (2, "model", 50, of_model),
        (2, "real-8x8", 100, [*real, *of_64]),
        (2, "trl-8x8", 50, [*trl, *of_64, steps_of_trl]),
        (2, "real-64x8", 60, [*real, *of_512]),
        (2, "trl-64x8", 50, [*trl, *of_512, steps_of_trl]),
        (2, "quickstart", 60, [*training, *quickstart]),
    ]
    return [
        Part(name=name, limit_s=limit_s * (4 if device == "cpu" else 1), command=[python, *command], call=call)
        for call, name, limit_s, command in told
        if name != "setup" or python != sys.executable
    ]


def run_part(part: Part, folder: Path, limit_s: float, settings: Mapping[str, str]) -> Result:
    """Run a part with these variables in `folder`, a new one for all its files, and end all that it started."""
    folder.mkdir()
    settings = {MARK: str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **settings}
    settings |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    log, started_s = folder / "output.log", time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *part.command],  # should this process be killed
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            state = "failed" if process.wait(limit_s) else "passed"
        except subprocess.TimeoutExpired:
            state = "timed out"
            end(folder, signal.SIGABRT)  # Python then prints the stacks of all threads
        finally:
            end(folder, signal.SIGKILL)
            process.wait()
    texts = [path.read_text(errors="replace") for path in [log, *sorted(folder.rglob("*.log"))]]
    return Result(
        name=part.name,
        command=" ".join(part.command),
        state=state,
        seconds=round(time.monotonic() - started_s, 1),
        rows=rows_of(texts[0]),
        tracebacks=[*dict.fromkeys(one for text in texts for one in TRACEBACK.findall(text))][:MAX_TRACEBACKS],
        output=texts[0][-MAX_OUTPUT:],
    )


def end(folder: Path, number: signal.Signals) -> None:
    """Send a signal to each process of the part that runs in `folder`, and wait some seconds for their end.

    Children come first: many end with their parent, and each shall have the time to write its stacks.
    """
    mark, deadline_s = f"{MARK}={folder}\0".encode(), time.monotonic() + DYING_S
    told, is_any = set[int](), True
    while is_any and time.monotonic() < deadline_s:
        is_any = False
        for pid in sorted((int(path.name) for path in Path("/proc").glob("[0-9]*")), reverse=True):
            with suppress(OSError):  # it has ended, or is another user's
                if mark in Path(f"/proc/{pid}/environ").read_bytes():  # empty for one that has ended
                    is_any = True
                    if pid not in told:  # a second signal would cut the stacks off
                        os.kill(pid, number)
                    told.add(pid)
        time.sleep(0.1)


def rows_of(text: str) -> list[dict[str, str]]:
    """Return the rows of all markdown tables in a text, by column; other lines may come between them."""
    lines, header, rows = text.splitlines(), list[str](), list[dict[str, str]]()
    for line, below in zip(lines, [*lines[1:], ""], strict=False):
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if below.startswith("|---"):
            header = cells
        elif line.startswith("| "):
            rows.append(dict(zip(header, cells, strict=False)))
    return rows


def machine() -> dict[str, str]:
    """Return what the figures are of."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    found = {"date": time.strftime("%Y-%m-%d"), "cores": str(os.cpu_count()), "python": platform.python_version()}
    with suppress(OSError, subprocess.TimeoutExpired):
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write(out: Path, about: Mapping[str, str], results: Sequence[Result]) -> None:
    """Write what is known so far, as JSON and as a page."""
    told = {"machine": about, "parts": [asdict(one) for one in results]}
    (out / "results.json").write_text(json.dumps(told, indent=1))
    lines = ["# On one GPU", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += ["| part | | s |", "|---|---|---|"]
    lines += [f"| {one.name} | {one.state} | {one.seconds:.0f} |" for one in results]
    for one in results:
        lines += ["", f"## {one.name}: {one.state}", "", f"`{one.command}`"]
        shown = "\n".join(one.output.splitlines()[-SHOWN_LINES:])
        for text in [shown, *(more for more in one.tracebacks if more not in shown)]:
            lines += ["", "````", text.strip(), "````"] if text.strip() else []
    (out / "results.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    sys.exit(main())
