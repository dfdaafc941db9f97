"""Tasksets and harnesses of verifiers, its version 1: the package runs the harness's program and scores what it did.

    solve ─▶ the package's `run_episode` ─▶ program ─▶ its interception server ─▶ the gateway, with the rollout's key
                          └─ trace ─▶ rewards; an error in it is `infra`

A process opens an environment once; its rollouts share it.
"""

import asyncio
import importlib
import itertools
import json
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from typing import Any

from areal_agent import ConfigError, Rollout, SandboxError
from envs.verifiers.tasks import SPLITS, is_held_out, require_verifiers

NO_KEY = "AREAL_AGENT_NO_KEY"
"""A variable that is not set: the key goes in a header, for each rollout has its own."""


def load(split: str, seed: int, env: dict[str, Any], size: int | None = None) -> list[dict[str, Any]]:
    """Return the tasks of an environment, of its first `size` ones those of the split; an endless taskset needs it.

    `env` is the package's own `[env]` section: `{taskset: {id: ...}, agent: {harness: ..., runtime: ..., max_turns:
    ...}}`. The hash of a task says whether it is held out, as one in five is. Raises ConfigError.
    """
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SPLITS))}")
    made = open_environment(env)
    if made.taskset.INFINITE and size is None:
        raise ConfigError(f"the taskset {made.taskset.config.id!r} is endless; give args.size")
    found = list(itertools.islice(made.taskset, size))
    rows = [task.data.model_dump(mode="json", exclude={"idx"}) for task in found]
    tasks = [
        {"id": f"{made.taskset.config.id}-{number}", "env": env, "number": number}
        for number, row in enumerate(rows)
        if is_held_out(row) == (split == "test")
    ]
    if not tasks:
        raise ConfigError(f"none of {len(rows)} tasks of {made.taskset.config.id!r} is in the split {split!r}")
    return tasks


def open_environment(env: Mapping[str, Any]) -> Any:
    """Return an environment, without what it serves. Raises ConfigError."""
    require_verifiers()
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        config = loaders.resolve_env_config(dict(env))
        made = loaders.load_environment(config)
        agents = list(config.agent_harnesses())
    except Exception as error:  # the boundary: a taskset's own code may raise anything
        raise ConfigError(f"verifiers cannot load {dict(env)}: {type(error).__name__}: {error}") from error
    if len(agents) != 1:
        raise ConfigError(f"the environment has the agents {', '.join(agents)}; one with a single agent can be trained")
    return made


async def solve(task: dict[str, Any], rollout: Rollout) -> float | None:
    """Return the sum of the task's rewards; each is a named part."""
    env, tasks = await rollout.shared(opener_of(json.dumps(task["env"], sort_keys=True)))
    vf: Any = importlib.import_module("verifiers.v1")
    client = vf.EvalClientConfig(base_url=rollout.base_url, api_key_var=NO_KEY, headers={"x-api-key": rollout.api_key})
    context = vf.ModelContext(model=rollout.model, client=client, sampling=vf.Sampling())
    episode = await env.run_episode(await asyncio.to_thread(tasks, task["number"]), context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or len(episode.traces) != 1:
        told = "; ".join(f"{one.type}: {one.message}" for one in errors) or f"{len(episode.traces)} runs of its agent"
        raise SandboxError(f"verifiers could not finish the rollout: {told}")
    (trace,) = episode.traces
    rollout.log(stop=trace.stop_condition)
    for name, value in trace.metrics.items():
        if value is not None:
            rollout.log(**{name: value})
    if not trace.rewards or None in trace.rewards.values():
        return None
    for name, reward in trace.rewards.items():
        rollout.reward(reward.score, name=name)
    return trace.reward


@cache
def opener_of(env: str) -> Callable[[Rollout], AbstractAsyncContextManager[Any]]:
    """Return what opens an environment: the same for the same section, so that its rollouts share it."""
    return partial(opened, env)


@asynccontextmanager
async def opened(env: str, _rollout: Rollout) -> AsyncGenerator[tuple[Any, Callable[[int], Any]]]:
    made = await asyncio.to_thread(open_environment, json.loads(env))  # its import takes seconds, once
    drawn, left, lock = list[Any](), iter(made.taskset), threading.Lock()

    def task(number: int) -> Any:
        with lock:  # rollouts ask in threads of their own, and a generator runs in one at a time
            drawn.extend(itertools.islice(left, max(0, number + 1 - len(drawn))))
        return drawn[number]

    async with made.serving():
        yield made, task
