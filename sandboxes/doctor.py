"""What of the sandboxes works on this machine, and why the rest does not. It tries things and changes nothing."""

import platform
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from areal_agent.errors import SandboxError
from sandboxes.cgroups import GroupTree
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE
from sandboxes.inner.launcher import landlock_version
from sandboxes.jail import try_jail
from sandboxes.seccomp import denying_filter

CONTAINERS, JAILS = "containers", "jails"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that works, or the reason why not."""

    subject: str
    works: bool
    detail: str


async def examine() -> list[Finding]:
    """Return all findings, in the order in which the backends need them."""
    findings = [await _attempt(CONTAINERS, _find_containers)]
    findings.append(await _attempt(JAILS, _build_jail))
    findings.append(await _attempt("control groups", _make_groups))
    findings.append(await _attempt("system-call filter", _assemble_filter))
    version = landlock_version()
    findings.append(
        Finding(subject="Landlock", works=version > 0, detail=f"version {version}" if version else "not in this kernel")
    )
    for language, program in {"C": "gcc", "C++": "g++", "JavaScript": "node", "Bash": "bash"}.items():
        path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
        findings.append(Finding(subject=language, works=path is not None, detail=path or f"{program} is not installed"))
    return findings


def strongest_backend(findings: list[Finding]) -> str:
    """Return the backend that `auto` would choose."""
    works = {finding.subject for finding in findings if finding.works}
    return "docker" if CONTAINERS in works else "jail" if JAILS in works else "subprocess"


async def _attempt(subject: str, act: Callable[[], Awaitable[str]]) -> Finding:
    try:
        return Finding(subject=subject, works=True, detail=await act())
    except SandboxError as error:
        return Finding(subject=subject, works=False, detail=str(error))


async def _build_jail() -> str:
    await try_jail()
    return "namespaces of processes, mounts, network, IPC and host name"


async def _find_containers() -> str:
    engine = await Engine.connect()
    try:
        await engine.image(DEFAULT_IMAGE)
        return f"Docker {engine.version}, runtimes {', '.join(sorted(engine.runtimes))}"
    finally:
        await engine.aclose()


async def _make_groups() -> str:
    if sys.platform != "linux":
        raise SandboxError(f"{sys.platform} has no control groups")
    groups = await GroupTree.open()
    await groups.aclose()
    return f"version {groups.versions}, for memory, processes and CPU"


async def _assemble_filter() -> str:
    return f"{len(denying_filter(platform.machine())) // 8} instructions for {platform.machine()}"
