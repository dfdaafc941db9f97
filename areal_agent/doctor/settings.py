"""The checks of what a config names beside the model: workflow, tasks, ports, folders, sandboxes and disk space.

They call the functions of run/preflight.py, where a run stops at its first fault; here every fault is reported.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import orjson

from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, Report, State, attempt, gib, output_of
from areal_agent.doctor.memory import NUM_SLOTS, Machine, TrainerMemory, uses_gpu
from areal_agent.doctor.model import ModelShape
from areal_agent.errors import ConfigError, SandboxError
from areal_agent.observe.trackers import require_installed
from areal_agent.rollout.config import SandboxConfig
from areal_agent.rollout.workflow import import_path, load_workflow
from areal_agent.run.preflight import (
    check_engine_module,
    check_ports,
    choose_folder,
    import_own_functions,
    load_all_tasks,
    require_gateway,
    require_sampling,
)
from areal_agent.section import is_import_path

ASKING_S = 120.0

Check = Callable[[Config], Awaitable[str]]
"""Returns what was found, or nothing where there is nothing to check. Raises ConfigError."""


async def check_settings(config: Config, name: str, report: Report) -> None:
    """Run all checks of settings. `name` names the run's default folder."""

    async def folder(config: Config) -> str:
        return f"{choose_folder(config, name, None).path} can be made"

    own: Mapping[str, Check] = {"workflow": _workflow, "tasks": _tasks, "engine.python": _engine_python}
    elsewhere: Mapping[str, Check] = {"gateway": _gateway}
    both = {"algorithm": _algorithm, "ports": _ports, "trackers": _trackers, "run folder": folder}
    for check, work in {**(elsewhere if config.is_online else own), **both}.items():
        if found := await attempt(report, check, work(config)):
            report.add(Finding(check, State.OK, found))


async def _workflow(config: Config) -> str:
    if config.workflow is None:
        raise ConfigError("'workflow' is missing; give it as 'package.module:name'")
    load_workflow(config.workflow)
    if config.rollout.workers:
        import_path(config.workflow)
    require_sampling(config)
    return config.workflow


async def _tasks(config: Config) -> str:
    tasks, held_out = load_all_tasks(config)
    return f"{len(tasks)} to train on, {len(held_out)} held out"


async def _gateway(config: Config) -> str:
    require_gateway(config)
    return f"{config.rollout.gateway_url}, its engine at {config.engine.url}; the admin key is there"


async def _engine_python(config: Config) -> str:
    """Check that the environment has the engine, without importing it, which would take many seconds."""
    if config.engine.python is None:
        return ""
    await asyncio.to_thread(check_engine_module, config.engine)
    return f"{config.engine.python} has {config.engine.backend}"


async def _algorithm(config: Config) -> str:
    """Check that a user's own advantage and loss can be imported."""
    import_own_functions(config.algorithm)
    return ", ".join(name for name in (config.algorithm.advantage, config.algorithm.loss) if is_import_path(name))


async def _ports(config: Config) -> str:
    check_ports(config)
    fixed = [port for port in (config.engine.port, *config.rollout.gateway_ports) if port]
    return f"{', '.join(map(str, fixed))}: free" if fixed else "any free ones"


async def _trackers(config: Config) -> str:
    require_installed(config.observe.trackers)
    return ", ".join(config.observe.trackers)


CONTAINERS = ("containers",)
JAILS = ("jails",)
NEEDS: Mapping[str, Sequence[str]] = {
    "docker": CONTAINERS,
    **dict.fromkeys(("jail", "bubblewrap", "namespaces"), JAILS),
    "embedded": JAILS,
    "auto": (*CONTAINERS, *JAILS),
    "subprocess": (),
}
"""The kinds of isolation on which each backend can be built; one of them is enough."""
STRENGTHS = ("none", "process", "namespaces", "container", "vm")
GIVES = {**dict.fromkeys(CONTAINERS, "container"), **dict.fromkeys(JAILS, "namespaces")}
"""The strength of isolation that each gives."""
FALLING_BACK = ("embedded", "auto")
WITHOUT_WALLS = ("none", "process")
"""The strengths at which FALLING_BACK backends accept plain processes."""


async def sandbox_findings(config: SandboxConfig) -> list[Finding]:
    """Return one finding. It is a warning where it matters only to workflows that open a sandbox."""
    return [judge(config, await ask() if NEEDS[config.backend] else {})]


async def ask() -> Mapping[str, str | None]:
    """Return None for each kind of isolation that works, else the reason. Raises SandboxError without an answer."""
    command = [sys.executable, "-m", "sandboxes", "doctor", "--json"]
    try:
        exit_code, output, errors = await output_of(command, ASKING_S)
    except TimeoutError:
        raise SandboxError(f"python -m sandboxes doctor gave no answer within {ASKING_S:g} s; run it alone") from None
    if exit_code:
        last = errors.strip().splitlines()[-1:]
        raise SandboxError(f"python -m sandboxes doctor failed: {' '.join(last)}; run it alone")
    return {one["subject"]: None if one["works"] else one["detail"] for one in orjson.loads(output)}


def judge(config: SandboxConfig, found: Mapping[str, str | None]) -> Finding:
    """Return the finding for the backend of a config.

    >>> judge(SandboxConfig(backend="docker"), {"containers": "no daemon answers"}).state
    <State.FAIL: 'fail'>
    """
    backend = config.backend
    needs = [name for name in NEEDS[backend] if is_enough(GIVES[name], config)]
    working = [name for name in needs if name in found and found[name] is None]
    causes = "; ".join(f"{name}: {found.get(name) or 'not known'}" for name in needs)
    change = ""
    if not needs and (NEEDS[backend] or not is_enough("process", config)):
        state, text = State.FAIL, f"{backend} never isolates as much as sandbox.min_isolation {config.min_isolation}"
        change = "set a stronger sandbox.backend, or a lower sandbox.min_isolation"
    elif working:
        state, text = State.OK, f"{working[0]} work here"
    elif not needs:
        state, text = State.WARN, "programs are limited, but not isolated from this machine"
        change = "for programs that a model wrote, set sandbox.backend=embedded"
    elif backend in FALLING_BACK and config.min_isolation in WITHOUT_WALLS:
        state, text = State.WARN, f"no isolation works here, so programs would only be limited ({causes})"
        change = "see python -m sandboxes doctor; nothing to do where the workflow opens no sandbox"
    elif backend in FALLING_BACK and config.min_isolation is None:
        state, text = State.WARN, f"no isolation works here, so a workflow that opens a sandbox fails ({causes})"
        change = "see python -m sandboxes doctor; sandbox.min_isolation=none limits programs without isolating them"
    else:
        state, text = State.FAIL, causes
        change = "see python -m sandboxes doctor, or another backend"
    return Finding("sandboxes", state, f"sandbox.backend {backend}: {text}", change)


def is_enough(strength: str, config: SandboxConfig) -> bool:
    return STRENGTHS.index(strength) >= STRENGTHS.index(config.min_isolation or "none")


SHARED_MEMORY = Path("/dev/shm")
FOLDERS_OF_SERVERS = 2
"""Further folders that SGLang and vLLM load: the one that serves and the next."""
FOLDERS_OF_DISK = 3
"""weights/channels.py keeps two, and writes a third."""


async def storage_findings(shape: ModelShape, config: Config, machine: Machine) -> list[Finding]:
    """Return a finding for checkpoints, and one for weights on their way."""
    memory = TrainerMemory(shape=shape, config=config, is_gpu=uses_gpu(config.trainer.device, machine))
    return [_checkpoints(memory, config), _weights(memory, config)]


def _checkpoints(memory: TrainerMemory, config: Config) -> Finding:
    """Check the disk for checkpoints. The newest is complete before the oldest is deleted."""
    number = config.trainer.keep_last + 1
    needed = number * memory.checkpoint_bytes
    path = Path(config.run_dir or "runs").absolute()
    place = next(one for one in (path, *path.parents) if one.is_dir())
    free = shutil.disk_usage(place).free
    found = (
        f"{number} checkpoints of {gib(memory.checkpoint_bytes)} (trainer.keep_last {config.trainer.keep_last}, and "
        f"the next one) need {gib(needed)} of {gib(free)} free at {place}"
    )
    if needed > free:
        change = "free disk space, set run_dir to another disk, or set trainer.keep_last=1"
        return Finding("disk", State.FAIL, found, change)
    return Finding("disk", State.OK, found)


def _weights(memory: TrainerMemory, config: Config) -> Finding:
    if config.trainer.transfer == "distributed":
        found = f"new weights go to the engine from {config.trainer.transfer_host}, without files"
        return Finding("transfer", State.OK, found)
    in_memory = config.trainer.transfer == "shared_memory" and os.access(SHARED_MEMORY, os.W_OK)
    place = SHARED_MEMORY if in_memory else Path(tempfile.gettempdir())
    copies = NUM_SLOTS if config.trainer.transfer == "shared_memory" else FOLDERS_OF_DISK
    may_load_folders = config.engine.backend != "embedded" or config.engine.url is not None  # of any backend
    if may_load_folders and config.trainer.transfer == "shared_memory":
        copies += FOLDERS_OF_SERVERS
    needed, free = copies * memory.published_bytes, shutil.disk_usage(place).free
    found = (
        f"new weights pass through {place}: {copies} copies of {gib(memory.published_bytes)} need {gib(needed)} of "
        f"{gib(free)} free there"
    )
    if needed <= free:
        return Finding("transfer", State.OK, found)
    remedy = "enlarge it (docker run --shm-size), or set trainer.transfer=disk" if in_memory else "free disk space"
    return Finding("transfer", State.FAIL, found, remedy)
