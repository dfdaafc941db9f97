"""Everything about a run that can be wrong before it starts: found here, as one line, with nothing half started.

It imports the workflow, loads the tasks, looks for the model and the ports. It starts no process and makes no file.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from areal_agent.cluster.local import check_port
from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.rollout.config import TasksConfig
from areal_agent.rollout.tasks import load_tasks
from areal_agent.rollout.workflow import Workflow, load_workflow
from areal_agent.run_folder import RunFolder
from areal_agent.types import Task

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TINY = "tiny"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """A config that holds together, with what it names loaded."""

    config: Config
    folder: RunFolder
    is_resumed: bool
    workflow: Workflow
    tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]

    @classmethod
    def check(cls, config: Config, *, workflow: object = None, name: str = "run", resume: str | None = None) -> Self:
        """Load and check. `workflow` replaces `config.workflow`; `name` names the default folder.

        Raises ConfigError.
        """
        source = config.workflow if workflow is None else workflow
        if source is None:
            raise ConfigError("'workflow' is missing; give it as 'package.module:name'")
        check_model(config.model)
        check_port(config.rollout.gateway_port, "rollout.gateway_port")
        check_port(config.engine.port, "engine.port")
        if config.engine.port and config.engine.port == config.rollout.gateway_port:
            raise ConfigError(f"engine.port and rollout.gateway_port are both {config.engine.port}; they must differ")
        return cls(
            config=config,
            folder=RunFolder.choose(config.run_dir, name) if resume is None else RunFolder.reopen(resume),
            is_resumed=resume is not None,
            workflow=load_workflow(source),
            tasks=load_tasks(config.tasks, "train", config.seed),
            eval_tasks=load_eval_tasks(config),
        )

    def summary(self) -> str:
        """What would run, in a few lines."""
        config = self.config
        action = "resumes" if self.is_resumed else "trains"
        answers = f"{config.batch_size} tasks x {config.group_size} rollouts"
        return (
            f"{action} {config.model} for {config.steps} steps of {answers} in {self.folder.path}\n"
            f"tasks: {len(self.tasks)} to train on, {len(self.eval_tasks)} held out; "
            f"max_staleness {config.max_staleness}, straggler {config.straggler}, preset {config.algorithm.preset}"
        )


def check_model(model: str) -> None:
    """Raise ConfigError unless `model` is `tiny`, a folder with a config.json, or the form of a hub name."""
    path = Path(model)
    if model == TINY:
        return
    if (path / "config.json").is_file():
        check_model_folder(path)
        return
    if path.exists():
        raise ConfigError(f"model {model!r} is no Hugging Face folder: it has no config.json")
    if not HUB_NAME.fullmatch(model):
        raise ConfigError(f"model {model!r}: there is no such folder; give a folder, a hub name (org/name) or 'tiny'")


def check_model_folder(path: Path) -> None:
    """Raise ConfigError for a folder that engine and trainer could not load."""
    try:
        described: object = json.loads((path / "config.json").read_bytes())
    except ValueError as error:
        raise ConfigError(f"model {str(path)!r}: its config.json is not JSON: {error}") from None
    model_type = cast(dict[str, object], described).get("model_type") if isinstance(described, dict) else None
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model {str(path)!r} is of type {model_type!r}; the embedded engine serves {', '.join(MODEL_TYPES)}"
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model {str(path)!r} has no weights: there is no .safetensors file")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"model {str(path)!r} has no tokenizer.json; save its fast tokenizer there")


def load_eval_tasks(config: Config) -> tuple[Task, ...]:
    """The held-out tasks, `eval.num_tasks` of them. Raises ConfigError when the source has fewer."""
    wanted = config.eval.num_tasks
    if wanted == 0:
        return ()
    source: TasksConfig = config.eval.tasks or config.tasks
    tasks = load_tasks(source, "test", config.seed, "eval.tasks")
    if len(tasks) < wanted:
        raise ConfigError(f"eval.num_tasks is {wanted}, but {source.source!r} has {len(tasks)} held-out tasks")
    return tasks[:wanted]
