"""The checks of what a config names beside the model: workflow, tasks, ports, folders, sandboxes and disk space.

They call the functions of run/preflight.py, where a run stops at its first fault; here every fault is reported.
"""

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import orjson

from areal_agent.cluster.local import describe_model
from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, Report, State, attempt, gib, output_of
from areal_agent.doctor.machines import Machine, uses_gpu
from areal_agent.doctor.memory import NUM_SLOTS, TrainerMemory
from areal_agent.doctor.model import ModelShape
from areal_agent.errors import ConfigError, SandboxError
from areal_agent.observe.trackers import require_installed
from areal_agent.rollout.config import SandboxConfig
from areal_agent.rollout.workflow import import_path, load_workflow
from areal_agent.run.benchmarks import load_benchmarks
from areal_agent.run.preflight import (
    check_environment,
    check_ports,
    check_teacher,
    choose_folder,
    describe_tasks,
    idle_clip,
    import_own_functions,
    load_all_tasks,
    require_gateway,
    require_sampling,
)
from areal_agent.run.teacher import open_teacher
from areal_agent.section import is_import_path

ASKING_S = 120.0

OF_CODE = ("workflow", "tasks", "algorithm")
"""Checks that come out the same on every machine."""

Check = Callable[[Config], Awaitable[str]]
"""Returns what was found, or nothing where there is nothing to check. Raises ConfigError."""


async def check_settings(config: Config, name: str, report: Report, *, is_here: bool) -> None:
    """Run all checks of settings; for a run elsewhere only those of its code. `name` names the run's default folder."""

    async def folder(config: Config) -> str:
        return f"{choose_folder(config, name, None).path} can be made"

    own: Mapping[str, Check] = {"workflow": _workflow, "tasks": _tasks, "engine.python": _engine_python}
    elsewhere: Mapping[str, Check] = {"gateway": _gateway}
    both = {
        "packages": _packages,
        "algorithm": _algorithm,
        "teacher": _teacher,
        "ports": _ports,
        "trackers": _trackers,
        "run folder": folder,
    }
    for check, work in {**(elsewhere if config.is_online else own), **both}.items():
        if not is_here and check not in OF_CODE:
            continue
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
    return describe_tasks(tasks, held_out, load_benchmarks(config))


async def _gateway(config: Config) -> str:
    require_gateway(config)
    return f"{config.rollout.gateway_url}, its engine at {config.engine.url}; the admin key is there"


async def _engine_python(config: Config) -> str:
    """Check that the environment has the engine, without importing it, which would take many seconds."""
    if config.engine.python is None:
        return ""
    await asyncio.to_thread(check_environment, config.engine)
    return f"{config.engine.python} has {config.engine.backend}"


SHIPPED = ("envs", "sandboxes")
"""The packages beside areal_agent. Other distributions have such names, too."""
DISTRIBUTION = "areal-agent"


async def _packages(config: Config) -> str:
    """Check that the packages beside areal_agent are its own, and that no distribution has written over them."""
    for name in SHIPPED:
        own, spec = Path(__file__).parents[2] / name, importlib.util.find_spec(name)
        found = [] if spec is None else list(spec.submodule_search_locations or [str(spec.origin)])
        if str(own) not in found:
            raise ConfigError(
                f"`import {name}` finds {', '.join(found) or 'nothing'}, which hides {own}; rename that, or start "
                "python in another folder"
            )
    others = {*importlib.metadata.packages_distributions().get("sandboxes", ())} - {DISTRIBUTION}
    if others:
        raise ConfigError(
            f"the distribution {', '.join(sorted(others))} has a package `sandboxes`, too, and wrote it over this one; "
            f"uninstall it, then install {DISTRIBUTION} again"
        )
    return f"{', '.join(SHIPPED)}: those of areal_agent"


async def _algorithm(config: Config) -> str:
    """Check that a user's own advantage and loss can be imported, and say if a clip that is set changes nothing."""
    import_own_functions(config.algorithm)
    own = (name for name in (config.algorithm.advantage, config.algorithm.loss) if is_import_path(name))
    return "; ".join(text for text in (f"preset {config.algorithm.preset}", ", ".join(own), idle_clip(config)) if text)


async def _teacher(config: Config) -> str:
    """Check that the teacher is there, and that its tokenizer is the model's as far as both are here."""
    check_teacher(config)
    teacher = config.algorithm.teacher
    if teacher is None:
        return ""
    if teacher.url is None:
        return f"{teacher.model}, in the trainer"
    model = await describe_model(config.model, config.seed)
    if model is None:
        raise ConfigError(f"model {config.model!r} is not built yet, so tokenizers cannot be compared; run it once")
    async with open_teacher(config, model, note=print):
        return f"{teacher.url} scores the ids of {model}"


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
    return [_checkpoints(memory, config, machine), _weights(memory, config, machine)]


def checkpoints_bytes(memory: TrainerMemory, config: Config) -> int:
    """Return the disk space of a run's checkpoints. The newest is complete before the oldest is deleted."""
    return (config.trainer.keep_last + 1) * memory.checkpoint_bytes


def num_copies(config: Config) -> int:
    """Return the number of copies of new weights that are on their way at once, in files."""
    is_in_memory = config.trainer.transfer == "shared_memory"
    may_load_folders = config.engine.backend != "embedded" or config.engine.url is not None  # of any backend
    return (NUM_SLOTS if is_in_memory else FOLDERS_OF_DISK) + FOLDERS_OF_SERVERS * (may_load_folders and is_in_memory)


def _folder_of_runs(config: Config) -> Path:
    """Return the folder, or the nearest one that there is, in which a run keeps what other machines read, too."""
    path = Path(config.cluster.shared_dir or config.run_dir or "runs").absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def _checkpoints(memory: TrainerMemory, config: Config, machine: Machine) -> Finding:
    needed = checkpoints_bytes(memory, config)
    place = _folder_of_runs(config)
    free = machine.disk_bytes if machine.is_elsewhere else shutil.disk_usage(place).free
    found = (
        f"{config.trainer.keep_last + 1} checkpoints of {gib(memory.checkpoint_bytes)} (trainer.keep_last "
        f"{config.trainer.keep_last}, and the next one) need {gib(needed)}"
    )
    is_beside = memory.saving(config.trainer.num_ranks, machine.available_bytes or machine.memory_bytes)
    how = f"training {'goes on' if is_beside else 'waits'} while one is written"
    remedy = "free disk space, set run_dir to another disk, or set trainer.keep_last=1"
    where = f"{'there' if machine.is_elsewhere else f'at {place}'}; {how} (trainer.async_save)"
    return _compared("disk", found, needed, free, where, remedy, "--disk")


def _weights(memory: TrainerMemory, config: Config, machine: Machine) -> Finding:
    if config.trainer.transfer == "distributed":
        found = f"new weights go to the engine from {config.trainer.transfer_host or 'the trainer'}, without files"
        return Finding("transfer", State.OK, found)
    has_memory = machine.is_elsewhere or os.access(SHARED_MEMORY, os.W_OK)
    in_memory = config.trainer.transfer == "shared_memory" and has_memory
    on_disk = _folder_of_runs(config) if config.cluster.kind == "ray" else Path(tempfile.gettempdir())
    place = SHARED_MEMORY if in_memory else on_disk
    needed = num_copies(config) * memory.published_bytes
    found = (
        f"new weights pass through {place}: {num_copies(config)} copies of {gib(memory.published_bytes)} need "
        f"{gib(needed)}"
    )
    option, free = ("--shm", machine.shared_memory_bytes) if in_memory else ("--disk", machine.disk_bytes)
    if not machine.is_elsewhere:
        free = shutil.disk_usage(place).free
    remedy = "enlarge it (docker run --shm-size), or set trainer.transfer=disk" if in_memory else "free disk space"
    return _compared("transfer", found, needed, free, "there", remedy, option)


def _compared(check: str, found: str, needed: int, free: int | None, where: str, remedy: str, option: str) -> Finding:
    """Return the finding for `needed` of `free` bytes; None where a machine elsewhere was not described so far."""
    if free is None:
        return Finding(check, State.SKIP, f"{found}; not compared with anything", f"give {option}")
    found = f"{found} of {gib(free)} free {where}"
    return Finding(check, State.OK, found) if needed <= free else Finding(check, State.FAIL, found, remedy)
