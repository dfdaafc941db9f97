"""The whole config of a run: loading a YAML file, overriding keys, and one-line errors.

Each section stands beside the component it configures; `Config` puts them together and checks what one section alone
cannot. Derived values are computed where they are needed and never asked for.
"""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails

from areal_agent.algorithms.config import GROUP_ADVANTAGES, AlgorithmConfig, before_preset
from areal_agent.cluster.config import ClusterConfig
from areal_agent.command import nearest
from areal_agent.engine.config import EngineConfig, read_arguments
from areal_agent.engine.vllm import ADAPTER_RANKS
from areal_agent.errors import ConfigError
from areal_agent.models.recipe import demonstrations_of
from areal_agent.observe.trackers import ObserveConfig
from areal_agent.rollout.config import EvalConfig, RolloutConfig, SandboxConfig, TrainingTasksConfig
from areal_agent.section import Section, is_named, section_of
from areal_agent.threads import cores_for, is_on_cpu, share_out
from areal_agent.trainer.config import TrainerConfig

Straggler = Literal["wait", "drop", "mask"]

_PRESET = "algorithm.preset"


class ConfigFile(Section):
    """A whole config file: a section that is read from YAML, with overrides."""

    shorthands: ClassVar[Mapping[str, str]] = {}
    """The key that a section's value alone stands for: `tasks: FILE`, `algorithm: ppo`."""

    @field_validator("*", mode="before")
    @classmethod
    def _value_alone(cls, value: object, info: ValidationInfo) -> object:
        key = cls.shorthands.get(str(info.field_name))
        return {key: value} if key and isinstance(value, str) else value

    @classmethod
    def load(cls, path: Path | str, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file and apply `key=value` overrides (dotted keys, YAML values). Raises ConfigError."""
        root, values = read_yaml(Path(path))
        # a preset first, then the keys that override it
        for override in sorted(overrides, key=lambda one: not one.startswith(f"{_PRESET}=")):
            _apply(values, override, cls.shorthands)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            fault = error.errors()[0]
            what = _explain(fault, cls)
            location = [str(part) for part in fault["loc"]]
            named = re.split(r"[^\w.]", what, maxsplit=1)[0].split(".")
            if fault["type"] == "value_error" and named[: len(location)] == location:
                location = named  # a fault between several keys begins with one of them
            raise ConfigError(f"{_origin(location, root, path, overrides)}: {what}") from None

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "config") -> Self:
        """Validate decoded values. Raises ConfigError with the first fault, the value received and the remedy."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{where}: {_explain(error.errors()[0], cls)}") from None

    def with_overrides(self, overrides: Sequence[str], where: str) -> Self:
        """Return a copy in which `key=value` overrides are applied; `where` begins errors. Raises ConfigError."""
        values = self.model_dump(mode="json")
        for override in overrides:
            _apply(values, override, self.shorthands)
        return self.parse(values, where)

    def to_yaml(self) -> str:
        """The resolved config, as the run folder keeps it."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class Config(ConfigFile):
    """Everything that defines a run. `python -m areal_agent.train --config FILE [key=value ...]` reads it."""

    shorthands: ClassVar[Mapping[str, str]] = {"tasks": "source", "algorithm": "preset"}

    model: Annotated[str, Field(min_length=1)] = "tiny"
    """A Hugging Face folder, a hub name (`org/name`), or `tiny`: the quickstart's model, built on first use.
    `tiny:package.module:function` is warm-started on other demonstrations."""
    workflow: str | None = None
    """`package.module:name` of the workflow; from Python, `Run(config, workflow=...)` takes the object itself."""
    tasks: TrainingTasksConfig | None = None
    """The sources of tasks. Needed unless batches come from `rollout.gateway_url`."""
    run_dir: str | None = None
    """The run's folder; by default `runs/<name of the config file>`, with a number when that is taken."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of the tiny model, the order of tasks, sampling and training."""
    steps: Annotated[int, Field(ge=1)] = 100
    """The number of train steps."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Tasks (groups) per train step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts per task."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Versions by which the oldest token of a trajectory may lag when it is trained; 0 is synchronous."""
    straggler: Straggler = "wait"
    """The treatment of a rollout that would break the bound: `wait` for it, `drop` it, or `mask` its stale tokens."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """A preset's name, or a section with `preset:` and overrides."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = SandboxConfig()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="before")
    @classmethod
    def _evaluate_nothing_online(cls, values: Any) -> Any:
        """The default of `eval.num_tasks` is for runs that have a workflow."""
        match values:
            case {"rollout": {"gateway_url": str()}}:
                return {**values, "eval": {"num_tasks": 0} | (values.get("eval") or {})}
            case _:
                return values

    @model_validator(mode="before")
    @classmethod
    def _hand_weights_over_on_disk(cls, values: Any) -> Any:
        """The default of `trainer.transfer` is for one machine: those of a cluster share no memory."""
        match values:
            case {"cluster": {"kind": "ray"}} if isinstance(trainer := values.get("trainer", {}), dict):
                return {**values, "trainer": {"transfer": "disk"} | trainer}
            case _:
                return values

    @model_validator(mode="after")
    def _suits_its_algorithm(self) -> Self:
        teacher = self.algorithm.teacher
        has_rewards = teacher is None or not teacher.is_alone
        if self.group_size == 1 and self.algorithm.advantage in GROUP_ADVANTAGES and has_rewards:
            raise ValueError(
                f"group_size is 1, and advantage {self.algorithm.advantage!r} compares the rollouts of one group: "
                "nothing would ever be learned; set group_size to 2 or more, or algorithm.advantage to reinforce_pp"
            )
        if self.algorithm.minibatches > self.batch_answers:
            raise ValueError(
                f"algorithm.minibatches is {self.algorithm.minibatches}, but a step has only {self.batch_answers} "
                "rollouts (batch_size times group_size), and each minibatch needs at least one; lower it"
            )
        if self.algorithm.behavior_weight_level == "none" and self.max_staleness > 0:
            raise ValueError(
                f"algorithm.behavior_weight_level is 'none' and max_staleness is {self.max_staleness}: tokens of older "
                "weights need their importance weight; set it to 'token', or max_staleness to 0"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        require_one_stage(self)
        require_one_machine(self)
        require_adapters_applied(self)
        if self.is_online:
            require_online(self)
            return self
        require_room(self)
        if self.eval.api is None:
            require_answers_fit(self)
        require_one_client(self)
        if self.engine.url is not None:
            raise ValueError(
                "engine.url needs rollout.gateway_url; without it a run starts its own engine: leave it out"
            )
        if self.rollout.gateway_admin_key_file is not None:
            raise ValueError("rollout.gateway_admin_key_file needs rollout.gateway_url, which is not set; leave it out")
        if self.tasks is None:
            raise ValueError("'tasks' is missing; give it a value")
        needs_held_out = self.eval.num_tasks and self.eval.tasks is None
        for source in self.tasks.sources:
            if needs_held_out and not source.has_held_out_split:
                raise ValueError(
                    f"tasks.source {source.source!r} is one {'split' if source.split else 'file'}, and evaluation "
                    "needs held-out tasks: set eval.tasks, or eval.num_tasks=0"
                )
        return self

    def with_threads(self, *, trains: bool = True) -> Self:
        """Return this config with numbers for `engine.threads` and `trainer.threads`, as this machine has cores."""
        engine, trainer = self.engine, self.trainer
        if self.cluster.kind == "ray":
            return self
        is_engine_here = not (self.is_online or engine.urls)
        of_engine, of_trainer = share_out(
            cores_for(Path(self.model)) if demonstrations_of(self.model) is None else 1,
            engine.threads,
            engine.num_servers * (is_engine_here and is_on_cpu(engine.device)),
            trainer.threads,
            trainer.num_ranks * (trains and is_on_cpu(trainer.device)),
        )
        found: dict[str, Section] = {"trainer": trainer.model_copy(update={"threads": of_trainer})}
        if is_engine_here:
            found["engine"] = engine.model_copy(update={"threads": of_engine})
        return self.model_copy(update=found)

    @property
    def is_online(self) -> bool:
        """Return whether batches come from a gateway that stands alone."""
        return self.rollout.gateway_url is not None

    @property
    def batch_answers(self) -> int:
        """Rollouts per train step: B of the staleness bound."""
        return self.batch_size * self.group_size


ONLINE_KEYS = {
    "engine": ("url", "backend"),
    "rollout": ("gateway_url", "gateway_admin_key_file", "straggler_wait_s", "history_thinking", "train_roots"),
}
"""The keys of the run's own engine and rollouts that count when the agents are elsewhere."""


def require_online(config: Config) -> None:
    """Refuse settings that only the run's own rollouts use, when the agents are elsewhere."""
    if config.engine.url is None:
        raise ValueError(
            "rollout.gateway_url needs engine.url: the engine behind that gateway, into which weights are pushed"
        )
    if config.straggler == "mask":
        raise ValueError("straggler is 'mask', which needs the run's own rollouts; give 'wait' or 'drop'")
    if config.algorithm.dynamic_sampling:
        raise ValueError(
            "algorithm.dynamic_sampling is true, which needs the run's own rollouts: agents elsewhere choose their own "
            "tasks; set it to false"
        )
    if config.trainer.oversized == "refuse":
        raise ValueError("trainer.oversized is 'refuse', which needs the run's own engine; give 'alone'")
    strangers = [name for name in ("workflow", "tasks") if getattr(config, name) is not None]
    strangers += ["eval.num_tasks"] * (config.eval.num_tasks != 0) + ["eval.benchmarks"] * bool(config.eval.benchmarks)
    for name, heeded in ONLINE_KEYS.items():
        section: Section = getattr(config, name)
        strangers += [f"{name}.{key}" for key in section.model_dump(exclude_defaults=True) if key not in heeded]
    if strangers:
        raise ValueError(
            f"{strangers[0]} has no effect with rollout.gateway_url: agents and engine are elsewhere; leave it out"
        )


def require_one_client(config: Config) -> None:
    """SGLang cannot let requests end before a push. Its client can, but only for the requests of its own process."""
    if config.engine.backend == "sglang" and config.rollout.workers and config.engine.on_push != "interrupt":
        raise ValueError(
            f"engine.on_push is {config.engine.on_push!r}, which engine.backend sglang supports only without workers, "
            f"and rollout.workers is {config.rollout.workers}; set on_push to 'interrupt', or workers to 0"
        )


def require_one_stage(config: Config) -> None:
    """SGLang confirms a push only for the first stage of a pipeline, so a distributed push needs a single stage."""
    stages = sorted({"--pp-size", "--pipeline-parallel-size"} & set(read_arguments(config.engine.server_args)))
    if stages and config.trainer.transfer == "distributed" and config.engine.backend == "sglang":
        raise ValueError(
            f"trainer.transfer is 'distributed', which SGLang does not support with {stages[0]} in engine.server_args; "
            "leave that out, or use 'shared_memory' or 'disk'"
        )


KEYLESS = frozenset({"--tokenizer-worker-num", "--grpc-port", "--grpc-mode", "--smg-grpc-mode", "--enable-http2"})
"""Options with which SGLang is called in ways that our launcher does not protect."""


def require_one_machine(config: Config) -> None:
    """Refuse what works on one machine only, where processes run on a cluster."""
    if config.cluster.kind == "local":
        return
    given = read_arguments(config.engine.server_args).keys()
    unprotected = ", ".join(sorted(given & KEYLESS))
    for key, is_local, remedy in (
        ("rollout.gateway_url", config.is_online, "leave cluster out"),
        ("engine.urls", bool(config.engine.urls), "leave it out: servers are started there"),
        ("engine.server_args", "--base-gpu-id" in given, "leave --base-gpu-id out: Ray chooses the GPUs"),
        ("engine.server_args", bool(unprotected), f"leave {unprotected} out: there, SGLang's calls need no key"),
        ("engine.first_gpu", config.engine.first_gpu > 0, "leave it out: Ray chooses the GPUs"),
        ("engine.release_kv", config.engine.release_kv, "leave it out: trainer and engines share no GPU"),
        ("trainer.transfer", config.trainer.transfer == "shared_memory", "set it to 'disk' or 'distributed'"),
        ("trainer.transfer_host", config.trainer.transfer_host is not None, "leave it out: each rank has its own"),
    ):
        if is_local:
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            raise ValueError(f"{key} is {value!r}, which cluster.kind ray does not support; {remedy}")


def require_adapters_applied(config: Config) -> None:
    """Adapters can be pushed alone only to servers that the run starts and that apply them.

    SGLang cannot change the adapters of an answer under way: it ends with those that it began with.
    """
    lora = config.trainer.lora
    if lora is None or lora.push == "merged":
        return
    if config.engine.backend != "vllm" or config.engine.urls or config.is_online:
        raise ValueError(
            "trainer.lora.push is 'adapter', which needs vLLM servers that the run starts (engine.backend vllm "
            "without engine.urls); use 'merged'"
        )
    if lora.rank > ADAPTER_RANKS[-1]:
        raise ValueError(
            f"trainer.lora.push is 'adapter' and trainer.lora.rank is {lora.rank}, but vLLM supports ranks up to "
            f"{ADAPTER_RANKS[-1]}; lower the rank, or use 'merged'"
        )
    if config.trainer.transfer not in ("shared_memory", "disk"):
        raise ValueError(
            f"trainer.lora.push is 'adapter', and trainer.transfer {config.trainer.transfer!r} cannot transfer adapter "
            "folders; use 'shared_memory' or 'disk'"
        )


def require_room(config: Config) -> None:
    """Require that the engine's longest sequence fits into a micro-batch, with `trainer.oversized: refuse`.

    The last token of a sequence is predicted and never read, so a sequence may be one token longer than the budget.
    """
    longest, budget = config.engine.max_context_tokens, config.trainer.tokens_per_micro_batch
    if config.trainer.oversized == "refuse" and longest - 1 > budget:
        raise ValueError(
            f"trainer.oversized is 'refuse', and a sequence of engine.max_context_tokens = {longest} does not fit into "
            f"trainer.tokens_per_micro_batch = {budget}; raise that, or set trainer.oversized to 'alone'"
        )


def require_answers_fit(config: Config) -> None:
    """Require that an answer of `rollout.max_tokens` is not longer than the context."""
    if config.rollout.max_tokens > config.engine.max_context_tokens:
        raise ValueError(
            f"rollout.max_tokens is {config.rollout.max_tokens}, and engine.max_context_tokens is "
            f"{config.engine.max_context_tokens}, which prompt and answer share; lower the first, or raise the second"
        )


class _UniqueKeysLoader(yaml.SafeLoader):
    """YAML forbids a key that is given twice; PyYAML silently lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: set[Hashable] = set()
        for inner in (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):
            key = self.construct_object(inner, deep=True)
            if isinstance(key, Hashable):  # PyYAML refuses others
                if key in known:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice; keep one", inner.start_mark
                    )
                known.add(key)
        return super().construct_mapping(node, deep)


MAX_VALUES = 100_000
"""The most values of a config, those behind an alias counted wherever it stands."""


def _parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the tree of nodes, and the values. Raises yaml.YAMLError."""
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None and _num_values(root, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES:,} values, or one within itself; use fewer aliases")
        return root, yaml.load(text, _UniqueKeysLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # of a tag, or of what looks like a date
        raise yaml.YAMLError(f"one of its values is not of its kind: {error}") from None


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values with all aliases written out; infinite for one within itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        is_scalar = isinstance(node, yaml.ScalarNode)
        known[id(node)] = 1 if is_scalar else 1 + sum(_num_values(one, known) for one in inner)
    return known[id(node)]


def read_yaml(path: Path) -> tuple[yaml.Node | None, dict[str, Any]]:
    """Return the tree of a file's nodes, which know their lines, and its values. Raises ConfigError."""
    try:
        text = path.read_text()
        root, values = _parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        what = ", ".join(text for text in (error.context, error.problem) if text)
        raise ConfigError(f"{path}{place}: not a YAML config: {what}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML config: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict | NoneType):  # an empty file is one without keys
        raise ConfigError(f"{path}: a config is a mapping of keys to values, got {type(values).__name__}")
    return root, cast(dict[str, Any], values or {})


def _origin(location: Sequence[str], root: yaml.Node | None, path: Path | str, overrides: Sequence[str]) -> str:
    """Return where a value was given: an override, or the file and the line of its key or of the section around it."""
    keys = {override: override.partition("=")[0].split(".") for override in reversed(overrides)}  # the last one wins
    for override, key in keys.items():
        if key == list(location[: len(key)]):
            return f"override {override!r}"
    line, node = None, root
    for name in location:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        key, node = next(((key, value) for key, value in pairs if key.value == name), (None, None))
        if key is None:
            break
        line = key.start_mark.line + 1
    inner = (
        f"override {override!r}" for override, key in keys.items() if location and key[: len(location)] == location
    )
    return next(inner, str(path)) if line is None else f"{path}:{line}"


def _apply(values: dict[str, Any], override: str, shorthands: Mapping[str, str]) -> None:
    key, equals, text = override.partition("=")
    if not (equals and key):
        raise ConfigError(f"override {override!r} is not of the form key=value, for example steps=10")
    try:
        _, value = _parse_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
    *sections, leaf = key.split(".")
    place = values
    for name in sections:
        inner = place.get(name)
        if isinstance(inner, str) and name in shorthands:
            inner = {shorthands[name]: inner}
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {name!r} is a value ({inner!r}), not a section")
        section = dict(cast(dict[str, Any], inner))
        if key == _PRESET:
            section = before_preset(section, str(value))
        place[name] = section
        place = place[name]
    place[leaf] = value


def _explain(details: ErrorDetails, file: type[Section]) -> str:
    """Return one line: the key, what is wrong with the value, and what is valid."""
    location = [str(part) for part in details["loc"]]
    key = ".".join(location)
    value = details["input"]
    match details["type"]:
        case "extra_forbidden":
            namesakes = [one for one in _keys_of(file) if one.rpartition(".")[2] == location[-1]]
            siblings = [".".join([*location[:-1], name]) for name in _fields_at(location[:-1], file)]
            remedy = f"did you mean {' or '.join(map(repr, namesakes))}?" if namesakes else nearest(key, siblings)
            return f"unknown key {key!r}; {remedy}"
        case "missing":
            return f"{key!r} is missing; give it a value"
        case "value_error":
            message = details["msg"].removeprefix("Value error, ")
            if message.startswith("is "):
                return f"{key} {message}"
            return f"{key}: {message}" if key and not message.startswith(f"{key}.") else message
        case "model_type":
            return f"{key} is {value!r}, and it is a section: give its keys, or leave it out"
        case _:
            message = details["msg"][0].lower() + details["msg"][1:]
            return f"{key} is {value!r}; {message}"


def _keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield all keys, with dots, but those of sections that users name."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if (inner := section_of(field)) is not None and not is_named(field):
            yield from _keys_of(inner, f"{prefix}{name}.")


def _fields_at(location: Sequence[str], section: type[Section]) -> Sequence[str]:
    names = iter(location)
    for name in names:
        field = section.model_fields.get(name)
        if field is not None and is_named(field):
            next(names, None)
        inner = None if field is None else section_of(field)
        if inner is None:
            return ()
        section = inner
    return tuple(section.model_fields)
