"""Runs a task's tests under watch, and says how far their verdict can be trusted.

::

    host ── watched_tests ──▶ supervisor (inside/supervisor.py), which nobody in the sandbox may look into
                                 │ traces
                                 ▼
                              /bin/sh /tests/test.sh ── the tests' user and rights: reads /tests, writes the reward
                                 ├── python3 ...         loads inside/witness.py first, which reports to the supervisor:
                                 │                       started SECRET ... agent FILE ... saw KIND ... ended SECRET
                                 └── /app/solution       a program of the agent's: the same user, confined by Landlock
                                                         as it starts; neither /tests nor the reward's folder opens
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sandboxes.folder import Entry, pack
from sandboxes.sandbox import Sandbox
from sandboxes.spec import ExecResult, Limits
from sandboxes.tasks.handover import Kind, Suspicion

INSIDE = Path(__file__).with_name("inside")
SUPERVISOR, WITNESS = (INSIDE.joinpath(f"{name}.py").read_text() for name in ("supervisor", "witness"))
NOT_FROM_HERE = "import sys\nsys.path.remove('')\n"
"""Keeps the supervisor from loading modules that lie in the working directory."""
FOLDER, MODULE = "/.areal-agent", "areal_agent_witness"
KEPT = ("/tests", "/logs/verifier")
FORGET = f"sys.path.remove({FOLDER!r}); del sys.modules[{MODULE!r}]"
LOAD = f"import sys; sys.path.append({FOLDER!r}); import {MODULE}; {FORGET}\n"
LOAD_FIRST = f"""import {MODULE}, sys
{FORGET}; del sys.modules["sitecustomize"]
try: import sitecustomize
except ImportError: pass
"""
"""A `sitecustomize`, for interpreters that the tests install; it lets one of the interpreter's own have its turn."""
FIND_SITES = """
import glob, os
roots = {os.path.dirname(os.path.realpath(folder)) for folder in os.environ["PATH"].split(":")}
for root in sorted({*roots, *glob.glob("/opt/*"), *glob.glob("/opt/*/envs/*")}):
    for kind in ("python3*/site-packages", "python3*/dist-packages"):
        for folder in glob.glob(f"{root}/lib/{kind}"): print(os.path.realpath(folder))
"""
MAX_REASONS = 10
READS_IN = re.compile(
    r"(?m)(?:^|[;&|]\s*)(?:source|\.|eval)\s+([^\s;&|]+)|-c\s+[\"']?\$\((?:cat|<)\s*([^\s)]+)|"
    r"cat\s+([^\s;&|]+)\s*\|\s*(?:\w*sh|python[\d.]*)\b"
)
"""What a shell reads in, and runs, or has run by an interpreter."""


class Trust(StrEnum):
    """How far a verdict can be trusted. What the agent could do about it grows downwards."""

    PROVED = "proved"  # none of the agent's code ran with the tests' rights
    IN_PROCESS = "in-process"  # some did, or may have: a determined program could have changed what the tests say
    OWN_SANDBOX = "own sandbox"  # the tests ran where the agent had worked


@dataclass(slots=True)
class Seen:
    """What was seen of a run of the tests. `reasons` say why its verdict is not proved."""

    reasons: list[str] = field(default_factory=list[str])
    suspicions: list[Suspicion] = field(default_factory=list[Suspicion])
    early_ends: list[Suspicion] = field(default_factory=list[Suspicion])  # a failure of the tests would explain them
    end: str = ""  # how the tests' script ended; empty: the supervisor did not see it

    @property
    def trust(self) -> Trust:
        return Trust.IN_PROCESS if self.reasons else Trust.PROVED


async def watched_tests(
    box: Sandbox,
    command: str,
    *,
    env: Mapping[str, str],
    limits: Limits,
    declared: Sequence[str],
    is_python: bool,
) -> tuple[ExecResult, Seen]:
    """Run the tests' command."""
    if is_python:
        watch = f"\nwatch({list(declared)!r}, {KEPT!r})\n"
        files = {f"{MODULE}.py": WITNESS + watch, "sitecustomize.py": LOAD_FIRST}
        archives = await box.archives()
        entries = [Entry(f"{FOLDER[1:]}/{name}", text.encode()) for name, text in files.items()]
        await archives.load(pack([Entry(FOLDER[1:], None), *entries]), "/")
        for site in (await box.exec_python(NOT_FROM_HERE + FIND_SITES)).stdout.decode().splitlines():
            await archives.load(pack([Entry(f"{MODULE}.pth", LOAD.encode())]), site)
    call = f"supervise({command!r}, {dict(env)!r}, {list(declared)!r}, {KEPT!r}, {FOLDER if is_python else ''!r})\n"
    result = await box.exec_python(f"{NOT_FROM_HERE}{SUPERVISOR}\n{call}", limits=limits)
    return result, seen_in(result.stdout.decode(errors="replace"))


def seen_in(said: str) -> Seen:
    r"""Understand what the supervisor said.

    >>> seen_in("7 started S\n7 agent /app/f.py\n7 exited 0\ndone 0\n").early_ends[0].kind
    <Kind.EARLY_EXIT: 'early_exit'>
    """
    seen, secrets, agents = Seen(), dict[str, str](), dict[str, str]()
    loaders, ends, exits = dict[str, str](), dict[str, str](), dict[str, str]()
    for line in said.split("\n"):  # not other ends of lines, which a process may have sent
        match line.split(" ", 3):
            case ["done", how, *_]:
                seen.end = how
            case ["unconfined", *why]:
                seen.reasons.append(f"the agent's programs had the tests' rights: {' '.join(why)}")
            case ["given", *what]:
                seen.reasons.append(f"the tests hand what is theirs to a program of the agent's: {' '.join(what)}")
            case ["changed", *path]:
                seen.reasons.append(f"a program of the agent's wrote {' '.join(path)}, which the tests' may load")
            case [pid, "loads", name, *_]:
                loaders[pid] = name
            case [pid, "started", secret, *_]:
                secrets.setdefault(pid, secret)
            case [pid, "agent", *path]:
                agents[pid] = " ".join(path)
                seen.reasons.append(f"{agents[pid]} ran inside the tests")
            case [_, "saw", kind, what] if kind in set(Kind):
                seen.suspicions.append(Suspicion(Kind(kind), what))
            case [pid, "ended", secret, status] if secret == secrets.get(pid):
                ends[pid] = status
            case [pid, "exited", status, *_]:
                exits[pid] = status
            case _:
                pass
    for name in (name for pid, name in loaders.items() if pid not in secrets):
        seen.reasons.append(f"{name} ran for the tests unwatched, and may have loaded the agent's files")
    for pid, path in agents.items():
        if exits.get(pid) == "0" and ends.get(pid) != "0":
            why = f"a process of the tests that ran {path} ended, as if it had passed, before its end"
            seen.early_ends.append(Suspicion(Kind.EARLY_EXIT, why))
    seen.reasons = list(dict.fromkeys(seen.reasons))[:MAX_REASONS]
    return seen
