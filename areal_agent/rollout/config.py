"""The config sections of tasks (their sources, mixture and order), rollouts, sandboxes and evaluation."""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from areal_agent.errors import ConfigError
from areal_agent.gateway.auth import usable_key
from areal_agent.images import SOURCE
from areal_agent.section import IMPORT_PATH, Section, is_import_path
from areal_agent.tokens.formats.answer_format import ToolFormat
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.loss_rule import LossRule, TrainRoots
from areal_agent.tokens.template import HistoryThinking


class SourceKind(StrEnum):
    """The kind of a source, told by how it is written."""

    FUNCTION = "function"  # package.module:function
    JSONL = "jsonl"  # a path that ends in .jsonl
    PARQUET = "parquet"  # a path that ends in .parquet
    DATASET = "dataset"  # a folder, or a name on the Hugging Face hub


ImportPath = Annotated[str, Field(pattern=rf"^{IMPORT_PATH.pattern}$")]


class SourceConfig(Section):
    """One source of tasks. In YAML a bare string is `source`."""

    source: Annotated[str, Field(min_length=1)]
    """`package.module:function`, called as `function(split, seed, **args)`; the path of a .jsonl or .parquet file; or a
    Hugging Face data set: a folder, or a name on the hub."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, Any])
    """Further arguments of the function, or of `datasets.load_dataset` (`{name: main, revision: ...}`)."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """The split of a data set, `train[:90%]` for example; by default `train` to train on and `test` to evaluate."""
    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """The workflow's names for columns, `{question: prompt}`; a task then has only these. By default all, as named."""
    filter: ImportPath | None = None
    """`package.module:predicate`, called with the data of each task; tasks for which it is false are left out."""
    name: Annotated[str, Field(pattern=r"^[^/\s]+$")] | None = None
    """The name of this source where sources are mixed; the ids of its tasks are `name/id`. By default the name of the
    file, the data set or the module.
    """
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """The weight of this source where sources are mixed: its share of the tasks is weight / sum of all weights."""

    @property
    def kind(self) -> SourceKind:
        """The kind, told from the form of `source`.

        >>> SourceConfig(source="data/gsm8k.jsonl").kind, SourceConfig(source="openai/gsm8k").kind
        (<SourceKind.JSONL: 'jsonl'>, <SourceKind.DATASET: 'dataset'>)
        """
        if is_import_path(self.source):
            return SourceKind.FUNCTION
        suffixes = {".jsonl": SourceKind.JSONL, ".parquet": SourceKind.PARQUET}
        return suffixes.get(Path(self.source).suffix, SourceKind.DATASET)

    @property
    def label(self) -> str:
        """`name`, or the default.

        >>> SourceConfig(source="envs.calculator.tasks:load").label, SourceConfig(source="data/gsm8k.jsonl").label
        ('envs.calculator.tasks', 'gsm8k')
        """
        if self.name is not None:
            return self.name
        is_function = self.kind is SourceKind.FUNCTION
        return self.source.partition(":")[0] if is_function else Path(self.source).stem or self.source

    @property
    def has_held_out_split(self) -> bool:
        """True when it has a separate split to evaluate on."""
        return self.kind is SourceKind.FUNCTION or (self.kind is SourceKind.DATASET and self.split is None)

    @model_validator(mode="before")
    @classmethod
    def _source_alone(cls, value: object) -> object:
        return {"source": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.split is not None and self.kind is not SourceKind.DATASET:
            raise ValueError(
                f"split has no effect on the source {self.source!r}: it is for Hugging Face data sets; leave it out"
            )
        if self.args and self.kind in (SourceKind.JSONL, SourceKind.PARQUET):
            raise ValueError(f"args have no effect on the source {self.source!r}: a file takes none; leave them out")
        return self


class TasksConfig(SourceConfig):
    """The sources of tasks."""

    mix: tuple[SourceConfig, ...] = ()
    """Further sources, each with the keys of this section up to `weight`, or the bare string."""

    @model_validator(mode="after")
    def _mixes_what_has_names(self) -> Self:
        labels = [one.label for one in self.sources]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"two sources have the name {twice!r}; set another name for one of them")
        if not self.mix and (self.name is not None or self.weight != 1.0):
            raise ValueError("name and weight have no effect on a single source: they are for mixing; leave them out")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """This source, and those mixed with it."""
        return (self, *self.mix)


class CurriculumConfig(Section):
    """Draw tasks that nearly always succeed or fail more rarely. `eval.success_reward` defines a success."""

    low: Annotated[float, Field(ge=0, le=1)] = 0.1
    """A task with a lower success rate is outside the band."""
    high: Annotated[float, Field(ge=0, le=1)] = 0.9
    """A task with a higher success rate is outside the band."""
    outside: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The probability that a task outside the band is drawn when its turn comes; otherwise it is passed over."""
    by: Annotated[str, Field(min_length=1)] | None = None
    """A key of the tasks' data, `level` for example: tasks with the same value share one success rate. By default each
    task has its own, which is known from its second epoch on.
    """

    @model_validator(mode="after")
    def _is_a_band(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; low must be less than high")
        return self


class TrainingTasksConfig(TasksConfig):
    """The sources of tasks and the order of their use. In YAML a bare string is `source`."""

    shuffle: bool = True
    """Shuffle each epoch of each source by `seed`; otherwise tasks come in their order."""
    curriculum: CurriculumConfig | None = None
    """Draw tasks by success rate; without this section every task comes once per epoch."""


ALTERED = (
    "altered (top_p, top_k, min_p, a penalty, a bias, min_tokens, a grammar or temperature 0), so they are not "
    "trained; let the run's sampling win with rollout.sampling_override=true (where agents start their own sessions: "
    '"sampling_override": true in /rl/start_session), or leave those parameters out in the agent'
)
"""What is said of tokens that are not trained for this reason, with the remedy."""


class OtherModel(Section):
    """A model behind an OpenAI-compatible URL, which workflows ask by its name here, and which is not trained."""

    url: Annotated[str, Field(pattern=r"^https?://[^/]+")]
    """The base URL; with most servers it ends in /v1."""
    model: str
    """The model's name there: `rollout.client(NAME).model`."""
    key_env: str | None = None
    """The environment variable with the key, in the processes that run workflows."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """The longest time that one call may take."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """More tries after answers 408, 409, 429 and 5xx, garbage, and a connection that fails."""

    def key(self, section: str) -> str:
        """Return the key; an error names this section of the config. Raises ConfigError."""
        if self.key_env is None:
            return "none"
        if not (key := os.environ.get(self.key_env)):
            raise ConfigError(
                f"{section}.key_env is {self.key_env!r}, a variable that is not set; export it before the run starts"
            )
        return usable_key(key, f"{section}.key_env: the variable {self.key_env}")


class RolloutConfig(Section):
    """The settings of rollouts."""

    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that run workflows, each with a gateway of its own; 0: all in the main process. Client and gateway
    together fill a core at some 400 turns per second.
    """
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Rollouts at once, over all workers."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """A rollout that runs longer is cancelled with its requests and sandboxes, and recorded as `timeout`."""
    straggler_wait_s: Annotated[float, Field(ge=0)] = 120.0
    """With `straggler: wait`: the longest time a batch waits for a group that would be too stale for the next one."""
    max_failed_groups: Annotated[int, Field(ge=1)] = 8
    """The run ends when this many groups in a row have failed as a whole."""
    max_flat_groups: Annotated[int, Field(ge=1)] = 256
    """With `algorithm.dynamic_sampling`: the run ends when this many groups in a row have had no spread in reward."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Sampling temperature of requests that name none."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens that a request without `max_tokens` may generate."""
    sampling_override: bool = False
    """Ignore what agents ask for in `temperature`, `top_p`, `top_k`, `min_p`, penalties and `logit_bias`: the run's
    sampling wins. Their `max_tokens`, `stop` and `seed` count all the same.
    """
    model_aliases: tuple[str, ...] = ()
    """More names by which agents may call the model, such as those that CLI agents insist on; `*`: every name."""
    image_sources: tuple[Annotated[str, Field(pattern=rf"^({SOURCE.pattern})$")], ...] = ()
    """From where the gateway fetches images that agents name by URL: hosts (`example.org`, `10.0.0.7:80`), and folders
    of its machine (`file:///srv/pictures`). Images that agents send themselves need none.
    """
    train_roots: TrainRoots = TrainRoots.ALL
    """The conversations of a session that are trained: `all`, or only the `main` one, which has the most turns; so
    titles, compacted contexts and sub-agents do not get the session's reward. Roots with the same first message after
    the system's are one conversation.
    """
    train_altered: bool = False
    """Also train tokens whose recorded probability is not the one they were sampled with: top-p, top-k, min-p,
    penalties, biases, a grammar. Their importance weights are then wrong by what was cut off.
    """
    block_warn_s: Annotated[float, Field(gt=0)] = 1.0
    """A workflow that blocks the event loop for this long is named in a warning; one that does so for `timeout_s`, and
    at least 30 seconds, is ended as an error.
    """
    history_thinking: HistoryThinking = HistoryThinking.TEMPLATE
    """The thinking of earlier answers, where the chat template would strip it: `template` lets it, at the price of a
    branch per turn; `keep` leaves it in the prompt, and exports a chat template that does so with every checkpoint.
    """
    models: dict[str, OtherModel] = Field(default_factory=dict[str, OtherModel])
    """Other models by name, which workflows ask with `rollout.client(NAME)`: a judge, say."""
    tool_format: ToolFormat | None = None
    """The format in which the model writes tool calls; by default that of its chat template."""
    reasoning_format: ReasoningFormat | None = None
    """The format in which the model marks its reasoning; by default that of its chat template."""
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the gateway on 127.0.0.1; 0 picks a free one. With workers it is the first one's; the others follow."""
    gateway_url: Annotated[str, Field(pattern=r"^https?://[^/]+")] | None = None
    """A gateway that stands alone (`python -m areal_agent.gateway`): batches are leased from it and the agents are
    elsewhere, so the config has no workflow and no tasks. Needs `engine.url`.
    """
    gateway_admin_key_file: str | None = None
    """The file with that gateway's admin key; by default it is read from `AREAL_AGENT_ADMIN_KEY`."""

    @model_validator(mode="after")
    def _every_worker_has_a_slot(self) -> Self:
        if self.workers > self.max_concurrent:
            raise ValueError(
                f"workers is {self.workers} and max_concurrent is {self.max_concurrent}, but every worker needs a "
                "rollout to run; lower workers, or raise max_concurrent"
            )
        if self.gateway_ports[-1] > 65535:
            raise ValueError(
                f"gateway_port is {self.gateway_port}, and {self.workers} workers would need ports up to "
                f"{self.gateway_ports[-1]}, but the last is 65535; lower it"
            )
        return self

    @property
    def loss_rule(self) -> LossRule:
        """Which sampled tokens are trained."""
        return LossRule(trains_altered=self.train_altered, roots=self.train_roots)

    @property
    def session(self) -> Mapping[str, Any]:
        """What every session is started with (`/rl/start_session`)."""
        return {
            "sampling": {"temperature": self.temperature, "max_tokens": self.max_tokens},
            "sampling_override": self.sampling_override,
            "model_aliases": self.model_aliases,
        }

    @property
    def gateway_ports(self) -> tuple[int, ...]:
        """The ports of all gateways: each worker's, or the main process's."""
        num_gateways = max(1, self.workers)
        return tuple(self.gateway_port + index if self.gateway_port else 0 for index in range(num_gateways))

    @property
    def block_limit_s(self) -> float:
        """The longest time that a workflow may block the event loop of its process."""
        return max(30.0, self.timeout_s)

    @property
    def slots(self) -> tuple[int, ...]:
        """`max_concurrent` divided among the gateways.

        >>> RolloutConfig(workers=3, max_concurrent=8).slots
        (3, 3, 2)
        """
        num_gateways = max(1, self.workers)
        each, rest = divmod(self.max_concurrent, num_gateways)
        return tuple(each + (index < rest) for index in range(num_gateways))


class SandboxConfig(Section):
    """The settings that a workflow finds in `rollout.sandbox`, for `sandboxes.open_pool(**rollout.sandbox)`."""

    backend: Literal["auto", "embedded", "docker", "jail", "subprocess", "bubblewrap", "namespaces"] = "embedded"
    """`docker` runs containers, `jail` namespaces; `subprocess` limits time, memory and output and does not isolate
    (see sandboxes/README.md). `auto` takes the strongest that works on this machine, `embedded` a jail. `bubblewrap`
    and `namespaces` are old names of `jail`. A workflow's module may name those that it can work with,
    `SANDBOX_BACKENDS = ("docker",)`: a run with another one is refused before it starts.
    """
    min_isolation: Literal["none", "process", "namespaces", "container", "vm"] | None = None
    """Sandboxes that isolate less than this are an error. `none` and `process` let `auto` and `embedded` fall back on
    `subprocess`, with a warning, where no isolation works; null does not.
    """
    wall_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds that one program may run."""
    memory_bytes: Annotated[int, Field(ge=16 * 2**20)] = 256 * 2**20
    """Memory of all programs of a sandbox together; without control groups, address space of each process."""
    output_bytes: Annotated[int, Field(ge=1)] = 64 * 2**10
    """Bytes that one program may print."""
    max_concurrent: Annotated[int, Field(ge=1)] = 16
    """Programs at once."""
    on_suspicion: Literal["keep", "zero", "drop"] = "zero"
    """What becomes of a rollout whose verdict is suspicious (a task folder's, see sandboxes/judge/README.md): its
    reward stays, counts as 0, or the rollout is not trained.
    """


class BenchmarkConfig(Section):
    """A benchmark of a run's evaluations. In YAML a bare string is `name`."""

    name: Annotated[str, Field(pattern=r"^(.*/)?[\w.-]+$", max_length=200)]
    """Of `areal_agent.eval --benchmark`, or a file like those of envs/benchmarks: `mine.yaml`."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Answers to each task."""
    num_tasks: Annotated[int, Field(ge=1)] | None = None
    """Its first tasks; by default as many as it has."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """`rollout.max_tokens` of its rollouts; by default its own."""

    @property
    def label(self) -> str:
        """The name without folder and `.yaml`."""
        return Path(self.name).name.removesuffix(".yaml")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class EvalConfig(Section):
    """The evaluation before and after training: the same tasks, seeds and sampling."""

    num_tasks: Annotated[int, Field(ge=0)] = 200
    """The number of held-out tasks; 0 skips evaluation."""
    tasks: TasksConfig | None = None
    """By default the training sources with split `test`. Files and named splits need tasks of their own here.
    """
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate also after every this many steps, beside training, in at most a quarter of `rollout.max_concurrent`;
    0: only before and after. Pushes go on meanwhile: its row in metrics.jsonl counts the answers of each weight
    version. A due evaluation is left out while the one before it is under way. A run that completes waits for the last
    one; an interrupted run cancels it, and a resume makes up for the last one due.
    """
    benchmarks: tuple[BenchmarkConfig, ...] = ()
    """Benchmarks that a run evaluates with its held-out tasks, at the same moments and in the same slots: names of
    `areal_agent.eval --benchmark`, or sections with `name`, `samples` (answers to each task, 1), `num_tasks` (its
    first) and `max_tokens` (of an answer).
    """
    api: OtherModel | None = None
    """The model that `python -m areal_agent.eval` grades instead of `model`, behind any OpenAI-compatible URL. Then
    `engine` has no effect, and there are no token records. Not for training.
    """
    success_reward: float = 1.0
    """A rollout whose total reward is at least this is a success."""

    @model_validator(mode="after")
    def _every_needs_tasks(self) -> Self:
        if self.every and not (self.num_tasks or self.benchmarks):
            raise ValueError(f"every is {self.every} and num_tasks 0: there is nothing to evaluate; give num_tasks")
        return self

    @model_validator(mode="after")
    def _benchmarks_have_names(self) -> Self:
        labels = [one.label for one in self.benchmarks]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"benchmarks has {twice!r} twice; leave one out")
        return self
