"""Benchmarks: files of keys that bring tasks, workflow and limits, in envs/benchmarks or of the user's own.

NAME.yaml ─▶ overrides of a config: `python -m areal_agent.eval --benchmark NAME`
          └▶ a `Benchmark` beside the held-out tasks of a run: `eval.benchmarks`
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal_agent.config import Config, read_yaml
from areal_agent.errors import ConfigError
from areal_agent.rollout.config import BenchmarkConfig
from areal_agent.rollout.draws import in_order
from areal_agent.rollout.local import BenchmarkSettings
from areal_agent.rollout.tasks import load_tasks, require_json
from areal_agent.rollout.workflow import load_workflow
from areal_agent.types import Task

FOLDER = "envs.benchmarks"


def overrides_of(name: str) -> tuple[list[str], int]:
    """Return what a benchmark sets in a config, as overrides, and its samples. Raises ConfigError."""
    _, sections = read_yaml(Path(name) if name.endswith(".yaml") else _file_of(name))
    num_samples = sections.pop("samples", 1)
    overrides = ["eval.success_reward=1.0"]  # unless the file says otherwise, whatever the run has
    match sections:
        case {"eval": {"tasks": tasks}}:
            overrides.append(f"tasks={json.dumps(tasks)}")
        case _:
            pass
    for section, value in sections.items():
        keys = {f"{section}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {section: value}
        overrides += [f"{key}={json.dumps(one)}" for key, one in keys.items()]
    return overrides, num_samples


def _file_of(name: str) -> Path:
    found = importlib.util.find_spec(FOLDER)
    folders = found.submodule_search_locations if found else None
    files = {path.stem: path for folder in folders or () for path in Path(folder).glob("*.yaml")}
    if name not in files:
        raise ConfigError(f"benchmark {name!r}: there is no such benchmark; there are {', '.join(sorted(files))}")
    return files[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark of a run, and how the workers of the run play it."""

    name: str
    samples: int  # answers to each task
    success_reward: float
    settings: BenchmarkSettings
    tasks: tuple[Task, ...]

    @classmethod
    def load(cls, config: Config, entry: BenchmarkConfig) -> Self:
        """Load its tasks and import its workflow. Its keys go over the run's, but for `engine`. Raises ConfigError."""
        where = f"eval.benchmarks: {entry.label}"
        keys = ["eval.benchmarks=[]", "eval.every=0"]
        keys += [key for key in overrides_of(entry.name)[0] if not key.startswith("engine.")]
        keys += [] if entry.num_tasks is None else [f"eval.num_tasks={entry.num_tasks}"]
        keys += [] if entry.max_tokens is None else [f"rollout.max_tokens={entry.max_tokens}"]
        own = config.with_overrides(keys, f"{where}, whose entry may set max_tokens and num_tasks")
        heeded = {"timeout_s", "max_tokens", "temperature", "sampling_override", "model_aliases"}
        strangers = [key for key, one in own.rollout if key not in heeded and one != getattr(config.rollout, key)]
        if strangers or own.seed != config.seed:
            stranger = f"rollout.{strangers[0]}" if strangers else "seed"
            raise ConfigError(f"{where} sets {stranger}, which is one for the whole run; move it into the config")
        source = own.eval.tasks or own.tasks
        assert source is not None  # checked by Config
        if own.workflow is None:
            raise ConfigError(f"{where} has no workflow, and neither has the config; add one to {entry.name}")
        load_workflow(own.workflow)
        tasks = in_order(load_tasks(source, "test", own.seed, where), own.eval.num_tasks, f"{where}: num_tasks")
        if not tasks:
            raise ConfigError(f"{where} has num_tasks 0, so there is nothing to evaluate; give it num_tasks")
        if own.rollout.workers:
            require_json(tasks)
        return cls(
            name=entry.label,
            samples=entry.samples,
            success_reward=own.eval.success_reward,
            settings=BenchmarkSettings(workflow=own.workflow, rollout=own.rollout, sandbox=own.sandbox),
            tasks=tasks,
        )

    @property
    def num_rollouts(self) -> int:
        return len(self.tasks) * self.samples

    def __str__(self) -> str:
        return f"{self.name} ({len(self.tasks)} tasks x {self.samples})"


def load_benchmarks(config: Config) -> tuple[Benchmark, ...]:
    """Load the benchmarks of a run. Raises ConfigError."""
    return tuple(Benchmark.load(config, one) for one in config.eval.benchmarks)
