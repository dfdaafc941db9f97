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

from areal_agent.algorithms.config import is_import_path
from areal_agent.cluster.local import check_this_host
from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, Report, State, examined
from areal_agent.doctor.machine import Machine, gib
from areal_agent.doctor.memory import NUM_SLOTS, TrainerMemory, uses_gpu
from areal_agent.doctor.model import ModelShape
from areal_agent.errors import ConfigError, SandboxError
from areal_agent.gateway.auth import find_admin_key
from areal_agent.observe.trackers import require_installed
from areal_agent.rollout.config import SandboxConfig
from areal_agent.rollout.tasks.loading import load_tasks, require_json
from areal_agent.rollout.workflow import import_path, load_workflow
from areal_agent.run.preflight import (
    check_engine,
    check_ports,
    choose_folder,
    import_own_functions,
    load_eval_tasks,
    make_curriculum,
)

IMPORTING_S = 60.0
SERVER_MODULES: Mapping[str, str] = {"sglang": "sglang", "vllm": "vllm"}
"""The module that the Python of an engine's environment must have, by backend."""

Check = Callable[[Config], Awaitable[list[Finding]]]


async def check_settings(config: Config, name: str, report: Report) -> None:
    """Run all checks of settings. `name` names the run's default folder."""
    own: Mapping[str, Check] = {"workflow": _workflow, "tasks": _tasks, "engine.python": _engine_python}
    elsewhere: Mapping[str, Check] = {"gateway": _gateway}
    for check, work in (elsewhere if config.is_online else own).items():
        await examined(report, check, work(config))
    await examined(report, "algorithm", _algorithm(config))
    await examined(report, "ports", _ports(config))
    await examined(report, "trackers", _trackers(config))
    await examined(report, "run folder", _folder(config, name))


async def _workflow(config: Config) -> list[Finding]:
    if config.workflow is None:
        raise ConfigError("'workflow' is missing; give it as 'package.module:name'")
    load_workflow(config.workflow)
    if config.rollout.workers:
        import_path(config.workflow)
    if config.rollout.temperature == 0:
        return [
            Finding(
                check="workflow",
                state=State.FAIL,
                found="rollout.temperature is 0: greedy answers have no sampling probability, so none can be trained",
                change="set rollout.temperature above 0 (areal_agent.eval takes 0)",
            )
        ]
    return [_ok("workflow", config.workflow)]


async def _tasks(config: Config) -> list[Finding]:
    assert config.tasks is not None  # checked by Config
    tasks, held_out = load_tasks(config.tasks, "train", config.seed), load_eval_tasks(config)
    make_curriculum(config, tasks)
    if config.rollout.workers:
        require_json((*tasks, *held_out))
    return [_ok("tasks", f"{len(tasks)} to train on, {len(held_out)} held out")]


async def _gateway(config: Config) -> list[Finding]:
    assert config.engine.url is not None  # checked by Config
    check_this_host(config.engine.url, "engine.url")
    find_admin_key(config.rollout.gateway_admin_key_file, os.environ)
    return [_ok("gateway", f"{config.rollout.gateway_url}, its engine at {config.engine.url}; the admin key is there")]


async def _engine_python(config: Config) -> list[Finding]:
    """Check that the environment has the engine, without importing it, which would take many seconds."""
    if config.engine.python is None:
        return []
    check_engine(config)
    module = SERVER_MODULES[config.engine.backend]
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    process = await asyncio.create_subprocess_exec(
        config.engine.python, "-c", program, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        exit_code = await asyncio.wait_for(process.wait(), IMPORTING_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if exit_code:
        raise ConfigError(
            f"engine.python = {config.engine.python!r} has no module {module!r}; install it into that environment"
        )
    return [_ok("engine.python", f"{config.engine.python} has {module}")]


async def _algorithm(config: Config) -> list[Finding]:
    """Check that a user's own advantage and loss can be imported."""
    import_own_functions(config.algorithm)
    own = [name for name in (config.algorithm.advantage, config.algorithm.loss) if is_import_path(name)]
    return [_ok("algorithm", ", ".join(own))] if own else []


async def _ports(config: Config) -> list[Finding]:
    check_ports(config)
    fixed = [port for port in (config.engine.port, *config.rollout.gateway_ports) if port]
    return [_ok("ports", f"{', '.join(map(str, fixed))}: free" if fixed else "any free ones")]


async def _trackers(config: Config) -> list[Finding]:
    require_installed(config.observe.trackers)
    return [_ok("trackers", ", ".join(config.observe.trackers))] if config.observe.trackers else []


async def _folder(config: Config, name: str) -> list[Finding]:
    return [_ok("run folder", f"{choose_folder(config, name, None).path} can be made")]


def _ok(check: str, found: str) -> Finding:
    return Finding(check=check, state=State.OK, found=found)


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
    """Return the finding for the backend of a config.

    >>> judge(SandboxConfig(backend="docker"), {"containers": "no daemon answers"}).state
    <State.FAIL: 'fail'>
    """
    backend = config.backend
    needs = [name for name in NEEDS[backend] if is_enough(GIVES[name], config)]
    if not needs and (NEEDS[backend] or not is_enough("process", config)):
        return _finding(
            State.FAIL,
            f"sandbox.min_isolation is {config.min_isolation}, but sandbox.backend {backend} never isolates that much",
            "set a stronger sandbox.backend, or a lower sandbox.min_isolation",
        )
    working = [name for name in needs if name in found and found[name] is None]
    if working:
        return _finding(State.OK, f"sandbox.backend {backend}: {working[0]} work here")
    if not needs:
        return _finding(
            State.WARN,
            f"sandbox.backend {backend}: programs are limited, but not isolated from this machine",
            "for programs that a model wrote, set sandbox.backend=embedded",
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
    place = nearest_folder(Path(config.run_dir or "runs"))
    free = shutil.disk_usage(place).free
    found = (
        f"{number} checkpoints of {gib(memory.checkpoint_bytes)} (trainer.keep_last {config.trainer.keep_last}, and "
        f"the next one) need {gib(needed)} of {gib(free)} free at {place}"
    )
    if needed > free:
        return Finding(
            check="disk",
            state=State.FAIL,
            found=found,
            change="free disk space, set run_dir to another disk, or set trainer.keep_last=1",
        )
    return Finding(check="disk", state=State.OK, found=found)


def _weights(memory: TrainerMemory, config: Config) -> Finding:
    if config.trainer.transfer == "distributed":
        found = f"new weights go to the engine from {config.trainer.transfer_host}, without files"
        return Finding(check="transfer", state=State.OK, found=found)
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
        return Finding(check="transfer", state=State.OK, found=found)
    remedy = "enlarge it (docker run --shm-size), or set trainer.transfer=disk" if in_memory else "free disk space"
    return Finding(check="transfer", state=State.FAIL, found=found, change=remedy)


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest parent that exists.

    >>> nearest_folder(Path("/none/such/folder"))
    PosixPath('/')
    """
    return next(one for one in (path, *path.absolute().parents) if one.is_dir())
