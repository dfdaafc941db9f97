"""The checks before a run starts: every fault of a config is found here, as one line, with nothing half started.

`Preflight.check` imports the workflow, loads the tasks, and looks for the model, the ports and the engine's Python.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal_agent.algorithms.config import AlgorithmConfig, load_own
from areal_agent.cluster.local import (
    TOKENIZER,
    check_port,
    check_this_host,
    is_described,
    read_described,
    require_model,
)
from areal_agent.cluster.ray_hosts import require_ray
from areal_agent.config import Config
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder
from areal_agent.gateway.auth import find_admin_key
from areal_agent.images import has_processor
from areal_agent.models.recipe import RECIPE, demonstrations_of, load_demonstrations, model_name
from areal_agent.rollout.config import OtherModel
from areal_agent.rollout.draws import Curriculum, in_order
from areal_agent.rollout.tasks import TaskSet, load_tasks, require_json
from areal_agent.rollout.workflow import Workflow, import_path, load_workflow
from areal_agent.run.benchmarks import Benchmark, load_benchmarks
from areal_agent.run.serving import transcript_settings
from areal_agent.run.teacher import require_same_vocabulary
from areal_agent.section import is_import_path
from areal_agent.tokens.renderer import Renderer
from areal_agent.trainer.checkpoint import latest_checkpoint, newest_step
from areal_agent.types import Task

EMBEDDED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
PROGRAM_S = 60.0
ORIGINAL = "original_max_position_embeddings"
LENGTH_DEPENDENT = ("longrope", "su", "dynamic")
"""Rotary embeddings that change for all tokens once a context is long: transformers does it by the batch, vLLM by the
context that it is started with."""

UNWINDOWED = ("mistral", "phi3")
"""SGLang 0.5.23 serves these as Llama, without their sliding window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """A config that has been checked, with the workflow and the tasks it names loaded."""

    config: Config
    folder: RunFolder
    is_resumed: bool
    workflow: Workflow | None  # None: the agents are elsewhere
    workflow_path: str | None  # the path under which workers import it; None without workers
    tasks: TaskSet
    eval_tasks: tuple[Task, ...]
    benchmarks: tuple[Benchmark, ...]

    @classmethod
    def check(
        cls,
        config: Config,
        *,
        workflow: object = None,
        name: str = "run",
        resume: str | None = None,
        trains: bool = True,
    ) -> Self:
        """Load and check. `workflow` replaces `config.workflow`; `name` names the default folder.

        An evaluation, which trains nothing, has all cores for its engine, and needs the held-out tasks alone. Raises
        ConfigError.
        """
        if config.cluster.kind == "ray":
            require_ray()
        source = config.workflow if workflow is None else workflow
        tasks, eval_tasks, benchmarks = TaskSet(sources=()), (), ()
        if config.eval.api is not None:
            check_api(config, config.eval.api, trains=trains)
        else:
            if resume is None or demonstrations_of(config.model) is None:  # a tiny model is in the folder of its run
                check_model(config.model, config.engine)
            check_context(config)
        check_teacher(config)
        if config.is_online:
            if source is not None:
                raise ConfigError(
                    "a workflow has no effect with rollout.gateway_url, whose agents are elsewhere; leave it out"
                )
            require_gateway(config)
        else:
            if source is None:
                raise ConfigError("'workflow' is missing; give it as 'package.module:name'")
            check_ports(config)
            for name, model in config.rollout.models.items():
                model.key(f"rollout.models.{name}")
            check_engine(config.engine)
            tasks, eval_tasks = load_all_tasks(config, trains=trains)
            check_sandbox(source, config.sandbox.backend)
            benchmarks = load_benchmarks(config) if trains else ()
            for one in benchmarks:
                check_sandbox(one.settings.workflow, one.settings.sandbox.backend)
        return cls(
            config=config.with_threads(trains=trains),
            folder=choose_folder(config, name, resume),
            is_resumed=resume is not None,
            workflow=None if source is None else load_workflow(source),
            workflow_path=import_path(source) if source is not None and config.rollout.workers else None,
            tasks=tasks,
            eval_tasks=eval_tasks,
            benchmarks=benchmarks,
        )

    @property
    def is_evaluated(self) -> bool:
        """Whether the run has anything to evaluate."""
        return bool(self.eval_tasks or self.benchmarks)

    def summary(self) -> str:
        """Return a few lines on what would run."""
        config = self.config
        action = "resumes" if self.is_resumed else "trains"
        answers = f"{config.batch_size} tasks x {config.group_size} rollouts"
        batches = f"tasks: {describe_tasks(self.tasks, self.eval_tasks, self.benchmarks)}"
        if config.is_online:
            batches = f"batches from {config.rollout.gateway_url}, weights to {config.engine.url}"
        is_here = demonstrations_of(config.model) is not None or Path(config.model).exists()
        hub = f"\nthere is no folder {config.model}: it is taken for a name on the hub, which was not asked"
        return (
            f"{action} {config.model} for {config.steps} steps of {answers} in {self.folder.path}\n{batches}; "
            f"max_staleness {config.max_staleness}, straggler {config.straggler}, preset {config.algorithm.preset}"
            + (f"\n{idle}" if (idle := idle_clip(config)) else "")
            + ("" if is_here else hub)
        )


def idle_clip(config: Config) -> str:
    """Return one line for a clip that is set and never binds, since the policy is the one it is clipped around."""
    algorithm = config.algorithm
    is_fresh = algorithm.proximal == "recompute" or config.max_staleness == 0
    is_set = any(
        getattr(algorithm, name) != AlgorithmConfig.model_fields[name].default
        for name in ("clip_low", "clip_high", "dual_clip")
    )  # the config of a resumed run gives every key
    if not is_set or algorithm.minibatches > 1 or not is_fresh or is_import_path(algorithm.loss):
        return ""
    of_proximal = algorithm.proximal + (" and max_staleness 0" if algorithm.proximal == "behavior" else "")
    return (
        f"the clip of loss {algorithm.loss} changes nothing: with one update a step and proximal {of_proximal} its "
        "ratio is 1; with algorithm.minibatches of 2 or more it moves"
    )


def require_sampling(config: Config) -> None:
    """Raise ConfigError for answers that are sampled greedily and are for training."""
    if config.rollout.temperature == 0 and not config.is_online:
        raise ConfigError(
            "rollout.temperature is 0: greedy answers have no sampling probability, so none of them could be trained; "
            "set it above 0 (areal_agent.eval takes 0)"
        )


def require_gateway(config: Config) -> None:
    """Raise ConfigError unless the engine behind the gateway is on this machine and the gateway's admin key is here."""
    assert config.engine.url is not None  # checked by Config
    check_this_host(config.engine.url, "engine.url")
    find_admin_key(config.rollout.gateway_admin_key_file, os.environ)


def choose_folder(config: Config, name: str, resume: str | None) -> RunFolder:
    if resume is None:
        return RunFolder.choose(config.run_dir, name, config.cluster.shared_dir)
    folder = RunFolder.reopen(resume, config.run_dir)
    shared_dir = folder.shared.parent if folder.is_divided else None
    if shared_dir != config.cluster.shared_dir:
        raise ConfigError(
            f"cluster.shared_dir is {config.cluster.shared_dir}, and the run of --resume {resume!r} has {shared_dir}; "
            "leave it as it was"
        )
    require_steps_left(folder, config.steps)
    return folder


def require_steps_left(folder: RunFolder, num_steps: int) -> None:
    """Raise ConfigError when no step is left. After the last step, an evaluation may still be left to do."""
    if newest_step(folder.checkpoints) < num_steps:
        return
    checkpoint = latest_checkpoint(folder.checkpoints)
    num_done = checkpoint.step if checkpoint else 0
    if num_done > num_steps or (num_done == num_steps and folder.is_completed):
        raise ConfigError(
            f"--resume {str(folder.path)!r}: {num_done} steps are done and steps is {num_steps}, so there is "
            f"nothing left to train; set steps to more than {num_done}"
        )


def check_ports(config: Config) -> None:
    """Raise ConfigError when a fixed port is in use or given twice."""
    check_port(config.engine.port, "engine.port")
    for port in config.rollout.gateway_ports:
        check_port(port, "rollout.gateway_port")
        if port and port == config.engine.port:
            raise ConfigError(f"engine.port and rollout.gateway_port are both {port}; they must differ")


def check_api(config: Config, api: OtherModel, *, trains: bool) -> None:
    """Raise ConfigError for a model behind an API that is to be trained, or whose key is missing."""
    if trains:
        raise ConfigError(
            f"eval.api is {api.url!r}, and a run trains and evaluates `model`; leave it out, or use areal_agent.eval"
        )
    if config.rollout.workers:
        raise ConfigError(
            f"rollout.workers is {config.rollout.workers}, and with eval.api one process runs all rollouts; set it to 0"
        )
    api.key("eval.api")


def check_teacher(config: Config) -> None:
    """Raise ConfigError for a teacher's folder that cannot be loaded, or has another tokenizer than the model's folder.

    Names on the hub, tiny models and servers are asked when the run starts.
    """
    teacher = config.algorithm.teacher
    if teacher is None or teacher.model is None or teacher.url is not None or demonstrations_of(teacher.model):
        return
    require_model(teacher.model, "algorithm.teacher.model")
    if (folder := Path(teacher.model)).exists():
        check_causal(folder)
        if (Path(config.model) / TOKENIZER).is_file():
            require_same_vocabulary(Path(config.model), folder)


def check_engine(engine: EngineConfig) -> None:
    """Raise ConfigError when there is no program at `engine.python`, which starts the servers."""
    python = engine.python
    if python is not None and shutil.which(python) is None:
        raise ConfigError(
            f"engine.python = {python!r}: there is no such program; give the Python of an environment with "
            f"{engine.backend} (for CPUs: python -m areal_agent.engine.environment {engine.backend} DIR)"
        )


def check_sandbox(workflow: object, backend: str) -> None:
    """Raise ConfigError for a backend with which the workflow cannot work: its module may name those that suit it."""
    name = workflow.partition(":")[0] if isinstance(workflow, str) else getattr(workflow, "__module__", "")
    if isinstance(workflow, str):
        load_workflow(workflow)  # imports its module
    suitable: Sequence[str] = getattr(sys.modules.get(name), "SANDBOX_BACKENDS", ())
    if suitable and backend not in ("auto", *suitable):
        raise ConfigError(
            f"sandbox.backend is {backend!r}, and the workflow in {name} needs {' or '.join(map(repr, suitable))}; set "
            f"it to {suitable[0]!r}"
        )


def check_environment(engine: EngineConfig) -> None:
    """Raise ConfigError when its environment lacks the engine, or finds no GPU that is asked for. It takes seconds."""
    check_engine(engine)
    python = engine.python or sys.executable
    has_none = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine.backend!r}) is None)"
    if engine.python is not None and _output_of([python, "-c", has_none]).returncode:
        raise ConfigError(
            f"engine.python = {python!r} has no module {engine.backend!r}; install it into that environment"
        )
    check_device(engine.device, "engine.device", python)


def check_device(device: str, key: str, python: str) -> None:
    """Raise ConfigError when the config's `key` asks for a GPU and the torch of this Python finds none."""
    has_none = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if device == "cuda" and _output_of([python, "-c", has_none]).returncode:
        raise ConfigError(f"{key} is 'cuda', and the torch of {python} finds no GPU here; set it to 'auto' or 'cpu'")


def _output_of(command: Sequence[str], given: str = "") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=PROGRAM_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} gave no answer within {PROGRAM_S:g} s; try it alone") from None


def check_for_dry_run(preflight: Preflight) -> str:
    """Check what takes seconds, and what a run leaves to its processes; return what was found. Raises ConfigError."""
    config, demonstrations = preflight.config, demonstrations_of(preflight.config.model)
    import_own_functions(config.algorithm)
    if config.cluster.kind == "local":  # on a cluster, Ray finds the GPUs
        if not config.is_online:
            check_environment(config.engine)
        check_device(config.trainer.device, "trainer.device", sys.executable)
    if demonstrations is not None and not preflight.is_resumed:
        model_name(RECIPE, config.seed, demonstrations)
    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        return ""
    require_trainable(folder, config.engine)
    renderer = transcript_settings(config, folder).load_renderer()
    return f"\nthe model {told_images(renderer)}; its chat template: {told_calls(renderer)}"


def told_images(renderer: Renderer) -> str:
    """Return whether the model gets images. It is proved, which takes seconds for one that sees."""
    return "takes images, too" if renderer.vision() else "takes text alone"


def told_calls(renderer: Renderer) -> str:
    """Return how the model's chat template has tool calls, and what it can serve, for people."""
    if not renderer.answer_format.has_calls:
        refused = "writes no tool calls that can be read back, so requests with tools are refused"
        return f"{refused} unless rollout.tool_format (hermes, for example) is set, or it is a template with tools"
    (served, refused), changes = renderer.arrangement.clients(), renderer.arrangement.changes()
    told = [f"tool calls as {renderer.answer_format.tool_format}", f"serves {', '.join(served) or 'nobody'}"]
    told += [f"would refuse some messages of {', '.join(refused)}"] if refused else []
    told += [f"given otherwise than sent: {', '.join(changes)}"] if changes else []
    return "; ".join(told)


def import_own_functions(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError when the user's advantage or loss cannot be imported or has the wrong signature.

    Such modules import torch, which a run leaves to its trainer; that raises the same error.
    """
    load_own(algorithm, "advantage")
    load_own(algorithm, "loss")


def check_model(model: str, engine: EngineConfig) -> None:
    """Raise ConfigError unless `model` is `tiny`, a folder that the engine could load, or the form of a hub name."""
    require_model(model)
    if (demonstrations := demonstrations_of(model)) is not None:
        load_demonstrations(demonstrations)
    elif is_described(Path(model)):
        check_model_folder(Path(model), engine)


def check_served(path: Path, engine: EngineConfig) -> None:
    """Raise ConfigError for a type that the engine does not serve; only the embedded engine has a list."""
    model_type = read_described(path).get("model_type")
    if model_type not in EMBEDDED_TYPES and engine.backend == "embedded" and engine.url is None:
        check_causal(path)  # another engine would be no remedy
        raise ConfigError(
            f"model {str(path)!r} is of type {model_type!r}, and the embedded engine serves only "
            f"{', '.join(EMBEDDED_TYPES)}; set engine.backend to 'sglang' or 'vllm'"
        )


def check_causal(path: Path) -> None:
    """Raise ConfigError for a model that can never be trained: an encoder, most that take images, quantised weights ...

    The types of the embedded engine can. For others transformers' tables are asked, which takes seconds.
    """
    described = read_described(path)
    if described.get("model_type") in EMBEDDED_TYPES and not described.get("quantization_config"):
        return
    sees = str(has_processor(path))
    if fault := _output_of([sys.executable, "-c", FAULT_OF, sees], json.dumps(described)).stdout:
        raise ConfigError(f"model {str(path)!r} cannot be trained: {fault}")


FAULT_OF = """
import json, sys
from areal_agent.models.causal import fault_of
sys.stdout.write(fault_of(json.load(sys.stdin), has_processor=sys.argv[1] == "True"))
"""


def check_context(config: Config, folder: Path | None = None) -> None:
    """Raise ConfigError for a longer context than the model was made for. `folder` is that of a model of the hub.

    Servers that run already have a context of their own.
    """
    path, engine = folder or Path(config.model), config.engine
    if engine.url or engine.urls:
        return
    if demonstrations_of(config.model) is not None:
        longest = RECIPE.max_context_tokens
    elif is_described(path):
        fields, rope = rope_of(path)
        longest = fields.get("max_position_embeddings")
        if longest and engine.backend != "embedded" and rope.get("factor"):  # YaRN: servers serve what it stretches to
            longest = max(longest, int(rope.get(ORIGINAL, longest) * rope["factor"]))
    else:
        return
    if longest and engine.max_context_tokens > longest:
        raise ConfigError(
            f"model {config.model!r} was made for {longest} tokens, but engine.max_context_tokens is "
            f"{engine.max_context_tokens}; set it to at most {longest}"
        )


def check_model_folder(path: Path, engine: EngineConfig) -> None:
    """Raise ConfigError for a folder that the engine could not load."""
    check_served(path, engine)
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model {str(path)!r} has no weights: there is no .safetensors file")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"model {str(path)!r} has no tokenizer.json; save its fast tokenizer there")


def require_trainable(path: Path, engine: EngineConfig) -> None:
    """Raise ConfigError, by its config.json, for a model that cannot be trained, or not in contexts of this length.

    What else a model needs to be trained the trainer proves as it loads it.
    """
    check_served(path, engine)
    check_causal(path)
    fields, rope = rope_of(path)
    kind = rope.get("rope_type", rope.get("type"))
    longest = rope.get(ORIGINAL) or fields.get(ORIGINAL) or fields.get("max_position_embeddings")
    longest = longest or engine.max_context_tokens
    if kind in LENGTH_DEPENDENT and engine.max_context_tokens > longest:
        raise ConfigError(
            f"engine.max_context_tokens is {engine.max_context_tokens}, but model {str(path)!r} computes all positions "
            f"in another way once a context exceeds {longest} tokens ({kind}), and trainer and engine differ in when "
            f"they do; set it to at most {longest}"
        )
    window = fields.get("sliding_window") if fields.get("model_type") in UNWINDOWED else None
    if engine.backend == "sglang" and window is not None and engine.max_context_tokens > window:
        raise ConfigError(
            f"engine.max_context_tokens is {engine.max_context_tokens}, but the tokens of model {str(path)!r} see "
            f"{window} tokens back, and all of them in SGLang: set it to at most {window}, or engine.backend to 'vllm'"
        )


def rope_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json of a model's text, and its rotary embeddings."""
    described = read_described(path)
    fields = described.get("text_config") or described
    return fields, fields.get("rope_parameters") or fields.get("rope_scaling") or {}


def make_curriculum(config: Config, tasks: TaskSet) -> Curriculum | None:
    """Return the curriculum; None where every task comes once per epoch. Raises ConfigError when tasks do not fit."""
    if config.tasks is None or config.tasks.curriculum is None:
        return None
    return Curriculum(config.tasks.curriculum, tasks, seed=config.seed, success_reward=config.eval.success_reward)


def load_all_tasks(config: Config, *, trains: bool = True) -> tuple[TaskSet, tuple[Task, ...]]:
    """Return the tasks to train on, if any, and those held out. Raises ConfigError where they do not fit."""
    assert config.tasks is not None  # checked by Config
    tasks = load_tasks(config.tasks, "train", config.seed) if trains else TaskSet(sources=())
    held_out = load_eval_tasks(config)
    if trains:
        make_curriculum(config, tasks)
    if config.rollout.workers:
        require_json((*tasks, *held_out))
    return tasks, held_out


def describe_tasks(tasks: TaskSet, held_out: Sequence[Task], benchmarks: Sequence[Benchmark]) -> str:
    """Return how many tasks a run has, of each kind."""
    named = [f"benchmarks {', '.join(map(str, benchmarks))}"] if benchmarks else []
    return ", ".join([f"{len(tasks)} to train on", f"{len(held_out)} held out", *named])


def load_eval_tasks(config: Config) -> tuple[Task, ...]:
    """Return the first `eval.num_tasks` held-out tasks. Raises ConfigError when the source has fewer."""
    wanted = config.eval.num_tasks
    if wanted == 0:
        return ()
    source = config.eval.tasks or config.tasks
    assert source is not None  # checked by Config
    return in_order(load_tasks(source, "test", config.seed, "eval.tasks"), wanted, "eval.num_tasks")
