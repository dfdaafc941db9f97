"""What a config names, beside the model: workflow, tasks, ports, its folder. Each fault by itself, not the first alone.

The checks are those of preflight.py, before which a run stops at the first fault.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

from areal_agent.algorithms.config import is_import_path
from areal_agent.cluster.hosts import check_this_host
from areal_agent.config import Config
from areal_agent.doctor.attempt import examined
from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.report import Report
from areal_agent.errors import ConfigError
from areal_agent.gateway.admin_key import find_admin_key
from areal_agent.observe.trackers.choice import require_installed
from areal_agent.preflight import (
    check_engine,
    check_ports,
    choose_folder,
    import_own_functions,
    load_eval_tasks,
    make_curriculum,
)
from areal_agent.rollout.tasks.loading import load_tasks, require_json
from areal_agent.rollout.workflow import import_path, load_workflow

IMPORTING_S = 60.0
SERVER_MODULES: Mapping[str, str] = {"sglang": "sglang", "vllm": "vllm"}
"""What the Python of an engine's environment must have, by backend."""

Check = Callable[[Config], Awaitable[list[Finding]]]


async def check_settings(config: Config, name: str, report: Report) -> None:
    """All of them. `name` names the run's default folder."""
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
    assert config.tasks is not None  # the config has seen to it
    tasks, held_out = load_tasks(config.tasks, "train", config.seed), load_eval_tasks(config)
    make_curriculum(config, tasks)
    if config.rollout.workers:
        require_json((*tasks, *held_out))
    return [_ok("tasks", f"{len(tasks)} to train on, {len(held_out)} held out")]


async def _gateway(config: Config) -> list[Finding]:
    assert config.engine.url is not None  # the config has seen to it
    check_this_host(config.engine.url, "engine.url")
    find_admin_key(config.rollout.gateway_admin_key_file, os.environ)
    return [_ok("gateway", f"{config.rollout.gateway_url}, its engine at {config.engine.url}; the admin key is there")]


async def _engine_python(config: Config) -> list[Finding]:
    """Whether the environment has the engine. It is asked without importing it, which takes many seconds."""
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
    """Of a user's own advantage and loss, whether they can be imported; nothing is to be said of ours."""
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
