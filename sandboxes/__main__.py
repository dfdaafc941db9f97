"""The command line `python -m sandboxes`: `doctor`, `check`, `reap` and `image`."""

import argparse
import asyncio
import json
import platform
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import NoReturn

from areal_agent.errors import SandboxError
from sandboxes.agent.kernel import landlock_version
from sandboxes.cgroups import GroupTree, reap_groups
from sandboxes.conformance import ROWS, Verdict, check
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE, make_default_image
from sandboxes.jail import try_jail
from sandboxes.pool import ISOLATION_OF, OLD_NAMES, Backend, open_pool
from sandboxes.seccomp import allowing_filter
from sandboxes.subprocess import reap_folders


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and a hint."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\ntry: {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = Parser(prog="python -m sandboxes", description="Sandboxes on this machine.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    examining = commands.add_parser("doctor", help="what works here, and why the rest does not")
    examining.add_argument("--json", action="store_true", help="for programs: subject, works, detail of each")
    checking = commands.add_parser("check", help="run the hostile suite; exit 1 when a row fails")
    checking.add_argument("--backend", choices=(*ISOLATION_OF, *OLD_NAMES), required=True)
    commands.add_parser("reap", help="remove what dead processes left")
    commands.add_parser("image", help="make the default image of containers, from this machine's package mirror")
    options = parser.parse_args()
    if options.command == "doctor":
        return asyncio.run(print_findings(as_json=options.json))
    if options.command == "check":
        return asyncio.run(print_table(options.backend))
    return asyncio.run(print_image() if options.command == "image" else print_reaped())


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that works, or the reason why not."""

    subject: str
    works: bool
    detail: str


async def print_findings(*, as_json: bool) -> int:
    """Print what works on this machine. It is tried, and nothing is changed."""
    findings = [
        await _attempt("containers", _find_containers),
        await _attempt("jails", _build_jail),
        await _attempt("control groups", _make_groups),
        await _attempt("system-call filter", _assemble_filter),
    ]
    version = landlock_version()
    said = f"version {version}" if version else "not in this kernel"
    findings.append(Finding(subject="Landlock", works=version > 0, detail=said))
    for language, program in {"C": "gcc", "C++": "g++", "JavaScript": "node", "Bash": "bash"}.items():
        path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
        findings.append(Finding(subject=language, works=path is not None, detail=path or f"{program} is not installed"))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return 0
    for finding in findings:
        print(f"{'yes' if finding.works else 'no':4}{finding.subject:24}{finding.detail}")
    strongest = "docker" if findings[0].works else "jail" if findings[1].works else "subprocess"
    print(f"backend auto takes: {strongest}")
    return 0


async def _attempt(subject: str, act: Callable[[], Awaitable[str]]) -> Finding:
    try:
        return Finding(subject=subject, works=True, detail=await act())
    except SandboxError as error:
        return Finding(subject=subject, works=False, detail=str(error))


async def _find_containers() -> str:
    async with aclosing(await Engine.connect()) as engine:
        await engine.image(DEFAULT_IMAGE)
        allowing_filter(engine.machine)
        return f"Docker {engine.version} at {engine.host}, runtimes {', '.join(sorted(engine.runtimes))}"


async def _build_jail() -> str:
    await try_jail()
    return "namespaces of processes, mounts, network, IPC and host name"


async def _make_groups() -> str:
    if sys.platform != "linux":
        raise SandboxError(f"{sys.platform} has no control groups")
    groups = await GroupTree.open()
    await groups.aclose()
    return f"version {groups.versions}, for memory, processes and CPU"


async def _assemble_filter() -> str:
    return f"{len(allowing_filter(platform.machine())) // 8} instructions for {platform.machine()}"


async def print_reaped() -> int:
    print(f"removed {reap_groups()} trees of control groups and {reap_folders()} folders of dead processes")
    try:
        async with open_pool(backend="docker") as pool:
            print(f"removed {await pool.reap()} containers of dead processes")
    except SandboxError as error:
        print(f"no containers: {error}")
    return 0


async def print_image() -> int:
    """Make the default image unless it exists; return 1 when it cannot be made."""
    try:
        async with aclosing(await Engine.connect()) as engine:
            is_new = await make_default_image(engine)
    except SandboxError as error:
        print(f"no image: {error}", file=sys.stderr)
        return 1
    print(f"{DEFAULT_IMAGE} {'is made' if is_new else 'was there'}")
    return 0


async def print_table(backend: Backend) -> int:
    """Print the hostile suite, a line per row; return 1 when a row failed, 2 when the backend does not work here."""
    num_failed = 0
    try:
        async with open_pool(backend=backend, wall_s=20.0) as pool:
            print("isolation:", pool.capabilities().isolation.value)
            for row in ROWS:
                verdict, seen = await check(row, pool)
                num_failed += verdict is Verdict.FAILED
                print(f"{row.number:3} {verdict.value:7}{row.harm} -> {row.required} {seen}".rstrip(), flush=True)
            for act in pool.capabilities().cannot_stop:
                print("cannot stop:", act)
    except SandboxError as error:
        print(f"the {backend} backend does not work here: {error}", file=sys.stderr)
        return 2
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
