"""Whether the sandboxes that a config asks for work here: `python -m sandboxes doctor` is asked, as a process."""

import asyncio
import sys
from collections.abc import Mapping, Sequence

import orjson

from areal_agent.doctor.finding import Finding, State
from areal_agent.errors import SandboxError
from areal_agent.rollout.config import SandboxConfig

COMMAND = (sys.executable, "-m", "sandboxes", "doctor", "--json")
ASKING_S = 120.0

CONTAINERS = ("containers",)
JAILS = ("walls by bubblewrap", "walls by namespaces")
NEEDS: Mapping[str, Sequence[str]] = {
    "docker": CONTAINERS,
    "bubblewrap": JAILS,
    "namespaces": ("walls by namespaces",),
    "embedded": JAILS,
    "auto": (*CONTAINERS, *JAILS),
    "subprocess": (),
}
"""What of a machine each backend can be built on; one of them is enough."""
STRENGTHS = ("none", "process", "namespaces", "container", "vm")
GIVES = {**dict.fromkeys(CONTAINERS, "container"), **dict.fromkeys(JAILS, "namespaces")}
"""How far each isolates, one of these strengths."""
FALLING_BACK = ("embedded", "auto")
WITHOUT_WALLS = ("none", "process")
"""Those that take plain processes where nothing better works."""


async def sandbox_findings(config: SandboxConfig) -> list[Finding]:
    """One. A workflow that opens no sandbox needs none: where only that is at stake, it is a warning."""
    return [judge(config, await ask() if NEEDS[config.backend] else {})]


async def ask() -> Mapping[str, str | None]:
    """What works (None), and why what does not. Raises SandboxError when the command gives no answer."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), ASKING_S)
    except TimeoutError:
        raise SandboxError(f"python -m sandboxes doctor gave no answer within {ASKING_S:g} s; run it alone") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise SandboxError(f"python -m sandboxes doctor failed: {' '.join(last)}; run it alone")
    return {one["subject"]: None if one["works"] else one["detail"] for one in orjson.loads(output)}


def judge(config: SandboxConfig, found: Mapping[str, str | None]) -> Finding:
    """What the backend of a config finds.

    >>> judge(SandboxConfig(backend="docker"), {"containers": "no daemon answers"}).state
    <State.FAIL: 'fail'>
    """
    backend = config.backend
    needs = [name for name in NEEDS[backend] if is_enough(GIVES[name], config)]
    if not needs and (NEEDS[backend] or not is_enough("process", config)):
        return _finding(
            State.FAIL,
            f"sandbox.min_isolation {config.min_isolation}: sandbox.backend {backend} never isolates so far",
            "a stronger sandbox.backend, or a lower sandbox.min_isolation",
        )
    working = [name for name in needs if name in found and found[name] is None]
    if working:
        return _finding(State.OK, f"sandbox.backend {backend}: {working[0]} work here")
    if not needs:
        return _finding(
            State.WARN,
            f"sandbox.backend {backend}: programs are limited, and not isolated from this machine",
            "for programs that a model wrote, sandbox.backend=embedded",
        )
    causes = "; ".join(f"{name}: {found.get(name) or 'not known'}" for name in needs)
    if backend in FALLING_BACK and config.min_isolation in WITHOUT_WALLS:
        return _finding(
            State.WARN,
            f"sandbox.backend {backend}: no isolation works here, so programs would only be limited ({causes})",
            "see python -m sandboxes doctor; nothing to do where the workflow opens no sandbox",
        )
    if backend in FALLING_BACK and config.min_isolation is None:
        return _finding(
            State.WARN,
            f"sandbox.backend {backend}: no isolation works here, so a workflow that opens a sandbox fails ({causes})",
            "see python -m sandboxes doctor; sandbox.min_isolation=none limits programs without isolating them",
        )
    return _finding(
        State.FAIL, f"sandbox.backend {backend}: {causes}", "see python -m sandboxes doctor, or another backend"
    )


def is_enough(strength: str, config: SandboxConfig) -> bool:
    return STRENGTHS.index(strength) >= STRENGTHS.index(config.min_isolation or "none")


def _finding(state: State, found: str, change: str = "") -> Finding:
    return Finding(check="sandboxes", state=state, found=found, change=change)
